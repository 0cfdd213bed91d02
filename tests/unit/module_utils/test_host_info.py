"""Parsers and collectors of the host facts, on captured files."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.gb10 import host_info
from ansible.module_utils.gb10.host_info import FACTS, Fact, Settings, gather

PLATFORM = Path(__file__).resolve().parents[2] / "fixtures/platform"


def text(name: str) -> str:
    return (PLATFORM / name).read_text()


DGX = [
    ("dgx_release_fe.txt", "7.3.1"),
    ("dgx_release_fe_ota_7.5.0.txt", "7.5.0"),
    ("dgx_release_asus_gx10_ota_history.txt", "7.6.0"),
    ("dgx_release_hp_unquoted.txt", "7.5.0"),
]


@pytest.mark.parametrize(("recorded", "version"), DGX)
def test_the_last_ota_version_is_the_effective_one(recorded: str, version: str) -> None:
    assert host_info.parse_dgx_release(text(recorded)) == version


def test_without_an_ota_the_factory_version_counts() -> None:
    assert host_info.parse_dgx_release('DGX_SWBUILD_VERSION="7.2.3"\n') == "7.2.3"
    assert host_info.parse_dgx_release("nothing\n") is None


DRIVERS = [
    ("proc_driver_nvidia_version_580.126.09.txt", "580.126.09"),
    ("proc_driver_nvidia_version_580.142.txt", "580.142"),
    ("proc_driver_nvidia_version_580.173.02.nearest.txt", "580.173.02"),
]


@pytest.mark.parametrize(("recorded", "version"), DRIVERS)
def test_driver_module(recorded: str, version: str) -> None:
    assert host_info.parse_driver_module(text(recorded)) == version


CMA = [
    ("meminfo_cma_free_gt_total_7.0.0-1019.txt", 0, 220924),
    ("meminfo_cma_normal.txt", 131072, 69320),
    ("meminfo_cma_zero_kho_off.txt", 0, 0),
]


@pytest.mark.parametrize(("recorded", "total", "free"), CMA)
def test_meminfo(recorded: str, total: int, free: int) -> None:
    numbers = host_info.parse_meminfo(text(recorded))
    assert (numbers["CmaTotal"], numbers["CmaFree"], numbers["MemAvailable"]) == (total, free, 14386092)


def test_the_command_line_is_compared_without_what_belongs_to_one_host() -> None:
    shared = host_info.parse_command_line(text("proc_cmdline_gx10_6.17.txt"))
    assert shared.startswith("ro init_on_alloc=0 iommu.passthrough=0 console=tty0")
    assert "UUID" not in shared
    other = text("proc_cmdline_gx10_6.17.txt").replace("0001 ro", "0002 ro").replace("6.17.0-1014", "6.17.0-1032")
    assert host_info.parse_command_line(other) == shared


FIRMWARE = [
    (
        "fwupd_get_devices_fe.constructed.json",
        {"firmware_ec": "0x03000508", "firmware_soc": "0x02009b0b", "firmware_pd": "0x00000516"},
    ),
    ("fwupd_get_devices_gx10_subset.json", {"firmware_ec": "0x02000005", "firmware_soc": "0x03000007"}),
]


@pytest.mark.parametrize(("recorded", "versions"), FIRMWARE)
def test_firmware_is_told_by_guid(recorded: str, versions: dict[str, str]) -> None:
    assert host_info.parse_firmware(text(recorded)) == versions


def test_two_devices_of_one_name_without_guid_are_unknown() -> None:
    device = '{"Name": "UEFI Device Firmware", "Version": "0x%d"}'
    assert host_info.parse_firmware(f'{{"Devices": [{device % 1}, {device % 2}]}}') == {}


@pytest.mark.parametrize("document", ["", "No devices", "[]", "{}"])
def test_no_device_list(document: str) -> None:
    with pytest.raises(host_info.HostInfoError, match="fwupdmgr printed no device list"):
        host_info.parse_firmware(document)


def test_packages_and_holds() -> None:
    status = (
        "Package: linux-image-nvidia-hwe-24.04\nStatus: hold ok installed\nVersion: 6.17.0-1032.32\n"
        "\nPackage: containerd.io\nStatus: install ok installed\nArch: x\n Version: not this\nVersion: 1.7.27-1\n"
        "\nPackage: nvidia-driver-570\nStatus: deinstall ok config-files\nVersion: 570.1\n"
        "\nPackage: vim\nStatus: install ok installed\nVersion: 9\n"
    )
    versions = {"linux-image-nvidia-hwe-24.04": "6.17.0-1032.32", "containerd.io": "1.7.27-1"}
    assert host_info.parse_packages(status) == (versions, ["linux-image-nvidia-hwe-24.04"])


MOUNTS = [
    (
        "10.10.0.11:/srv/models /srv/models nfs ro,relatime,vers=3,hard 0 0",
        [("/srv/models", "10.10.0.11", "/srv/models", "3", True)],
    ),
    (
        "[fd00::1]:/ /mnt/a\\040b nfs4 rw,vers=4.2 0 0\ntmpfs /run tmpfs rw 0 0",
        [("/mnt/a b", "fd00::1", "/", "4.2", False)],
    ),
    ("systemd-1 /srv/models autofs rw 0 0\nshort line", []),
]


@pytest.mark.parametrize(("table", "expected"), MOUNTS)
def test_nfs_mounts(table: str, expected: list[tuple[Any, ...]]) -> None:
    assert [tuple(row.values()) for row in host_info.parse_mounts(table)] == expected


OFFSETS = [("+316us", 0.316), ("-12.5ms", -12.5), ("+1min 2.5s", 62500.0), ("0", 0.0)]


@pytest.mark.parametrize(("offset", "milliseconds"), OFFSETS)
def test_time_offset(offset: str, milliseconds: float) -> None:
    assert host_info.parse_offset_ms(f"  Server: 192.0.2.1 (ntp)\n  Offset: {offset}\n") == milliseconds


def test_host_key_fingerprint_is_the_one_of_ssh_keygen() -> None:
    key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f spark1"
    assert (
        host_info.host_key_fingerprint(key) == "ssh-ed25519 SHA256:ZkAslGjFiUHdGf/WUL8rQvkib4PTvQatUV0OUQSncCA"
    )  # as ssh-keygen -lf printed it


def test_two_builds_of_one_library_differ(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_bytes(b"\0" * 200_000 + b"a")
    other.write_bytes(b"\0" * 200_000 + b"b")
    assert host_info.file_fingerprint(one) != host_info.file_fingerprint(other)
    other.write_bytes(one.read_bytes())
    assert host_info.file_fingerprint(one) == host_info.file_fingerprint(other)


def test_the_first_root_that_has_a_file_wins(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for root, release in ((first, "7.5.0"), (second, "7.3.1")):
        (root / "etc").mkdir(parents=True)
        (root / "etc/dgx-release").write_text(f"DGX_OTA_VERSION={release}\n")
    (second / "etc/machine-id").write_text("abc\n")
    facts = host_info.system(Settings(roots=(first, second)))
    assert (facts["dgx_release"].value, facts["machine_id"].value) == ("7.5.0", "abc")


def test_esrt_gives_what_fwupd_would(tmp_path: Path) -> None:
    for number, (guid, version) in enumerate(
        [("3D13C989-e6a8-4ead-95ee-921f09868f65", 0x03000508), ("b488217b-3895-4fc0-b1bf-ab7005a2d45a", 0x02009B0B)]
    ):
        entry = tmp_path / f"sys/firmware/efi/esrt/entries/entry{number}"
        entry.mkdir(parents=True)
        (entry / "fw_class").write_text(f"{guid}\n")
        (entry / "fw_version").write_text(f"{version}\n")
    facts = host_info.firmware(Settings(roots=(tmp_path,)))
    assert (facts["firmware_ec"].value, facts["firmware_soc"].value) == ("0x03000508", "0x02009b0b")
    assert facts["firmware_pd"].as_dict()["unknown"] == "not in the ESRT"


def test_an_engine_is_seen_by_its_control_group(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup/system.slice/vllm-rank.service"
    group.mkdir(parents=True)
    (group / "cgroup.procs").write_text("12\n13\n")
    assert host_info.services(Settings(roots=(tmp_path,)))["engine_pids"].value == [12, 13]
    assert host_info.services(Settings(roots=(tmp_path / "none",)))["engine_pids"].value == []


def test_a_bare_host_gives_every_fact_with_a_reason_for_each_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    facts = gather(Settings(roots=(tmp_path,), timeout_s=2.0))
    assert tuple(facts) == FACTS
    assert all(fact["unknown"] for fact in facts.values() if fact["value"] is None)
    assert facts["gpu_status"]["value"] == "absent"
    assert facts["kernel_release"]["unknown"].startswith("/proc/sys/kernel/osrelease: No such file")


def test_a_mount_that_never_answers_costs_the_bound_and_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mounts").write_text("h:/a /dead nfs ro 0 0\nh:/b /stale nfs ro 0 0\nh:/c /good nfs ro 0 0\n")

    def probe(path: Path) -> str:
        if path == Path("/dead"):
            time.sleep(60)
        if path == Path("/stale"):
            raise OSError(116, "Stale file handle")
        return "ok"

    monkeypatch.setattr(host_info, "probe_mount", probe)
    begun = time.monotonic()
    mounts = host_info.mounts(Settings(roots=(tmp_path,), timeout_s=0.3))["nfs_mounts"].value
    assert [row["state"] for row in mounts] == ["no answer in 0.3 s", "Stale file handle", "ok"]
    assert time.monotonic() - begun < 2


def test_a_collector_that_hangs_or_breaks_costs_its_own_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(_settings: Settings) -> dict[str, Fact]:
        time.sleep(60)
        return {}

    def breaks(_settings: Settings) -> dict[str, Fact]:
        raise ZeroDivisionError("a bug")

    collectors = {"slow": (hang, "one two"), "broken": (breaks, "three"), "partial": (lambda _: {}, "four")}
    monkeypatch.setattr(host_info, "COLLECTORS", collectors)
    facts = gather(Settings(roots=(tmp_path,), timeout_s=-1.7))
    assert {name: fact["unknown"] for name, fact in facts.items()} == {
        "one": "no answer in 0.3 s",
        "two": "no answer in 0.3 s",
        "three": "ZeroDivisionError: a bug",
        "four": "not reported",
    }


def test_the_probe_of_a_mount_reads_a_file_two_levels_down(tmp_path: Path) -> None:
    assert host_info.probe_mount(tmp_path) == "ok"
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    assert host_info.probe_mount(tmp_path) == "ok"
    with pytest.raises(FileNotFoundError):
        host_info.probe_mount(tmp_path / "gone")
