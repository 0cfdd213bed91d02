"""The DeepSeek profiles under `--check --diff`: the run ends well and shows every rank's exact argv and environment.

The hosts lend what check mode only looks at: the checkpoints are hollow (real headers and lengths, holes instead of
data), and so is the file system for each rank's rows.
"""

from __future__ import annotations

import csv
import json

import ansible_runner
import pytest

from embedded.checkpoints.hollow import make_hollow
from tests.embedded_hosts import HOSTS, PROJECT, on, run

FIXTURES = PROJECT / "tests/fixtures"
# Profile to the inventory of its hosts, and what is run: of a profile like the one before, the stage that differs.
RUNS = {
    "deepseek-v4.1-flash-tp4": ("inventory/embedded", "site.yml"),
    "deepseek-v4-flash-tp2": ("molecule/tp2/inventory", "site.yml"),
    "deepseek-v4-flash-tp2-container": ("molecule/tp2/inventory", "playbooks/serve.yml"),
}
CHECKPOINTS = {
    "DeepSeek-V4.1-Flash": ("config_v41_flash.json", {}),
    "DeepSeek-V4-Flash": ("config_v4_flash.json", {"total_bytes": 150_000_000_000}),
}
ROOM = "/var/tmp/rows.img"
LEND = f"""umount -q /var/lib/gb10/engram  # of a run that was killed
set -e
truncate -s 100G {ROOM}
mkfs.ext4 -q -F -E nodiscard,lazy_itable_init=1 -T largefile4 -O ^has_journal {ROOM}
mkdir -p /var/lib/gb10/engram
mount -o loop,noinit_itable {ROOM} /var/lib/gb10/engram"""
TAKE_BACK = f"umount /var/lib/gb10/engram; rmdir /var/lib/gb10/engram; rm -f {ROOM}"


@pytest.fixture(scope="module")
def _lent(tmp_path_factory):
    """The checkpoints on the head's disk, and room for 100 GB of rows on every host."""
    store = tmp_path_factory.mktemp("store")
    for name, (config, size) in CHECKPOINTS.items():
        make_hollow(store / name, FIXTURES / "model" / config, **size)
    packed = run("tar", "--sparse", "-cf", str(store / "store.tar"), "-C", str(store), *CHECKPOINTS)
    assert packed.returncode == 0, packed.stderr
    try:
        on(HOSTS[:1], "mkdir -p /srv/models && tar -x -C /srv/models", (store / "store.tar").read_bytes())
        on(HOSTS, LEND)
        yield
    finally:
        on(HOSTS, TAKE_BACK)
        on(HOSTS[:1], f"cd /srv/models && rm -rf {' '.join(CHECKPOINTS)}")


def differences(tmp_path, profile):
    """{host: {what: text after}} of every difference that the run shows, as Ansible hands it to its screen."""
    inventory, playbook = RUNS[profile]
    result = ansible_runner.run(
        private_data_dir=str(tmp_path),
        project_dir=str(PROJECT),
        playbook=playbook,
        cmdline=f"--inventory {PROJECT / inventory} --check --diff",
        # A host of 3 GB cannot have room for the model.
        extravars={"profile": profile, "memory_budget": False},
        quiet=True,
    )
    assert result.rc == 0, result.stdout.read()
    shown: dict[str, dict[str, str]] = {}
    for event in result.events:
        if event["event"] == "runner_on_file_diff":
            found = event["event_data"]["diff"] or []  # none of a secret
            for entry in found if isinstance(found, list) else [found]:
                shown.setdefault(event["event_data"]["host"], {})[entry.get("after_header", "")] = entry["after"]
    return shown


def published_rows(rank):
    """The ranges that were published for this rank of four, as the diff names them."""
    with (FIXTURES / "model/engram_layout_table.tsv").open() as table:
        lines = [line for line in csv.DictReader(table, delimiter="\t") if int(line["rank"]) == rank]
    return [f"layer {line['layer']} rows [{line['row_lo']}, {line['row_hi']})" for line in lines]


@pytest.mark.usefixtures("_lent")
@pytest.mark.parametrize("profile", RUNS)
def test_every_rank_is_shown_as_it_would_run(tmp_path, profile):
    golden = list(json.loads((FIXTURES / "golden" / f"{profile}.json").read_text(encoding="utf-8")).values())
    # The golden files are of the hosts in inventory/gb10.
    here = {"198.51.100.11": "198.18.1.11", "127.0.0.1": "198.18.0.11"}
    shown = differences(tmp_path, profile)
    assert sorted(shown) == HOSTS[: len(golden)]
    for number, (host, wanted) in enumerate(zip(HOSTS, golden, strict=False)):
        rank = json.loads(shown[host]["/etc/gb10/rank.json"].partition("\n")[2])
        assert rank["argv"] == [here.get(word, word) for word in wanted["argv"]]
        assert rank["environment"] == wanted["environment"]
        assert f"({profile})" in shown[host]["/etc/systemd/system/vllm-rank.service"]
        if rank["engram"]:
            size, *rows = shown[host]["/var/lib/gb10/engram"].splitlines()
            assert size == "52.4 GB of /srv/models/DeepSeek-V4.1-Flash (copy)"
            assert rows == published_rows(number)
