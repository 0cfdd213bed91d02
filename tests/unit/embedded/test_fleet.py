"""The embedded fleet's own logic: checkpoint, conflicts, power. Booting is what the scenarios do."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import struct
import subprocess
import tarfile
import time
import types
from pathlib import Path

import pytest

from embedded import network, power, settings, tiny_llama


def test_checkpoint_is_whole_and_the_same_every_time():
    files = tiny_llama.files()
    assert files == tiny_llama.files()
    shard = files["model-00001-of-00001.safetensors"]
    (length,) = struct.unpack("<Q", shard[:8])
    header = json.loads(shard[8 : 8 + length])
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    assert max(ends) == len(shard) - 8 - length
    index = json.loads(files["model.safetensors.index.json"])
    assert set(index["weight_map"]) == set(header) - {"__metadata__"}
    config = json.loads(files["config.json"])
    assert header["lm_head.weight"]["shape"] == [config["vocab_size"], config["hidden_size"]]
    assert header["model.layers.0.self_attn.q_proj.weight"]["shape"] == [
        config["num_attention_heads"] * config["head_dim"],
        config["hidden_size"],
    ]


def test_config_is_the_last_file_to_arrive():
    with tarfile.open(fileobj=io.BytesIO(tiny_llama.as_tar("tiny"))) as archive:
        assert archive.getnames()[-1] == "tiny/config.json"


def test_every_byte_has_its_own_token():
    vocabulary = json.loads(tiny_llama.files()["tokenizer.json"])["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(tiny_llama.VOCABULARY))


def links(*addresses: tuple[str, str, int]) -> str:
    return json.dumps(
        [{"ifname": name, "addr_info": [{"local": local, "prefixlen": prefix}]} for name, local, prefix in addresses]
    )


@pytest.mark.parametrize(
    ("addresses", "existing", "owner", "texts"),
    [
        ([("lo", "127.0.0.1", 8), ("eth0", "10.0.0.5", 24)], [], "", []),
        ([("eth0", "198.18.0.7", 24)], [], "", ["198.18.0.0/24 is in use: eth0 has 198.18.0.7/24"]),
        ([("eth0", "198.18.9.7", 15)], [], "", ["198.18.0.0/24 is in use", "198.18.1.0/24 is in use"]),
        ([], ["gb10m0"], "", ["interface gb10m0 exists and is not ours"]),
        ([("gb10m0", "198.18.0.1", 24)], ["gb10m0"], "ALIVE", ["belong to the embedded fleet of /elsewhere"]),
        ([("gb10m0", "198.18.0.1", 24)], ["gb10m0"], "DEAD", []),
        ([("gb10m0", "198.18.0.1", 24)], ["gb10m0"], "SELF", []),
    ],
)
def test_conflicts_of_the_networks(monkeypatch, tmp_path, addresses, existing, owner, texts):
    monkeypatch.setattr(network, "OWNER", tmp_path / "owner")
    if owner:
        (tmp_path / "owner").write_text(str(settings.STATE) if owner == "SELF" else "/elsewhere")
    monkeypatch.setattr(power, "anyone_on", lambda state: owner == "ALIVE")
    monkeypatch.setattr(network, "_exists", lambda name: name in existing)
    monkeypatch.setattr(network, "_ip", lambda *_: links(*addresses))
    faults = network.refuse_conflicts()
    assert len(faults) == len(texts)
    for fault, text in zip(faults, texts, strict=True):
        assert text in fault


@pytest.fixture
def host(monkeypatch, tmp_path):
    class Scratch(settings.Host):
        pid_record = property(lambda self: tmp_path / "pid")

    return Scratch(**dataclasses.asdict(settings.Host("spark-t", 9)))


def record(host, process) -> None:
    host.pid_record.write_text(f"{process.pid} {power._start_time(process.pid)}\n")


def test_power_loss_ends_every_process_of_the_host(host):
    process = subprocess.Popen(["sh", "-c", "sleep 300 & sleep 300"], start_new_session=True)
    time.sleep(0.2)
    record(host, process)
    assert power.session_of(host) == process.pid
    assert len(power._session_members(process.pid)) >= 2
    power.power_loss(host)
    assert power._session_members(process.pid) == []
    assert not power.is_on(host)
    process.wait()


def test_reused_pid_is_not_the_host(host):
    process = subprocess.Popen(["sleep", "300"], start_new_session=True)
    host.pid_record.write_text(f"{process.pid} 1\n")
    try:
        assert not power.is_on(host)
        power.power_loss(host)
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_zombie_is_off(host):
    process = subprocess.Popen(["true"], start_new_session=True)
    record(host, process)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not power.is_on(host)
    process.wait()


@pytest.mark.parametrize(("exists", "wanted"), [(False, "ubd0={disk},/images/new.img"), (True, "ubd0={disk}")])
def test_disk_stays_on_the_image_that_it_was_made_on(tmp_path, monkeypatch, exists, wanted):
    disk, started = tmp_path / "spark-z.cow", []
    host = types.SimpleNamespace(
        name="spark-z",
        disk=disk,
        taps=("m", "f"),
        macs=("", ""),
        management_address="",
        fabric_address="",
        console=tmp_path / "console",
        pid_record=tmp_path / "pid",
    )
    if exists:
        disk.write_text("")
    monkeypatch.setattr(power, "_preload", lambda: Path("/nothing"))
    monkeypatch.setattr(
        power.subprocess, "Popen", lambda command, **_: started.extend(command) or types.SimpleNamespace(pid=1)
    )
    power.power_on(host, Path("/images/new.img"))
    assert [word for word in started if word.startswith("ubd0")] == [wanted.format(disk=disk)]
