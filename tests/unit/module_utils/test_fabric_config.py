"""Which interface is configured, what is written, and that a busy host is left alone."""

from __future__ import annotations

import ipaddress
import subprocess
from pathlib import Path

import pytest
from ansible.module_utils.gb10 import fabric_config, roce

ADDRESS = ipaddress.ip_address("192.168.192.1")
NOT_KEPT = {"file": "", "mtu": 0, "volatile": []}


def netdev(name: str = "enp1s0f0np0", *addresses: str, mtu: int = 1500) -> roce.Netdev:
    return roce.Netdev(name, mtu, "UP", "", tuple(ipaddress.ip_interface(a) for a in addresses))


def port(netdev_name: str, phys: str = "LinkUp") -> roce.Port:
    return roce.Port("r", 1, "Ethernet", "ACTIVE", phys, 200, "", (netdev_name,), ())


def done(returncode: int = 0, stdout: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess([], returncode, stdout, "no such unit")


@pytest.mark.parametrize(
    ("netdevs", "ports", "named", "chosen"),
    [
        ([netdev(), netdev("b", "192.168.192.1/24")], [port("enp1s0f0np0")], "", "b"),
        ([netdev(), netdev("b")], [port("enp1s0f0np0"), port("b", "Disabled")], "", "enp1s0f0np0"),
        ([netdev(), netdev("b")], [port("enp1s0f0np0", "Disabled")], "", "enp1s0f0np0"),
        ([netdev(), netdev("b")], [port("enp1s0f0np0"), port("b")], "b", "b"),
    ],
)
def test_interface_is_chosen(netdevs, ports, named, chosen):
    assert fabric_config.choose_interface(netdevs, ports, ADDRESS, named).name == chosen


@pytest.mark.parametrize(
    ("ports", "named", "error"),
    [
        ([port("enp1s0f0np0"), port("b")], "", "the cabled RoCE ports have b, enp1s0f0np0; wanted exactly one"),
        ([], "", "the cabled RoCE ports have no interface"),
        ([port("enp1s0f0np0")], "eth9", "fabric_interface is eth9; found enp1s0f0np0, b"),
    ],
)
def test_doubtful_interface_is_refused(ports, named, error):
    with pytest.raises(fabric_config.ConfigError, match=error):
        fabric_config.choose_interface([netdev(), netdev("b")], ports, ADDRESS, named)


def test_networkd_is_used_without_netplan(tmp_path):
    plan = fabric_config.plan(netdev(), "192.168.192.1/24", 9000, NOT_KEPT, tmp_path)

    assert plan.file == "etc/systemd/network/05-gb10-fabric.network"
    assert "MTUBytes=9000\n" in plan.text
    assert "Address=192.168.192.1/24\n" in plan.text
    assert plan.apply == (("networkctl", "reload"), ("networkctl", "reconfigure", "enp1s0f0np0"))


def test_netplan_is_used_where_it_has_files(tmp_path, monkeypatch):
    monkeypatch.setattr(fabric_config.shutil, "which", lambda _: "/usr/sbin/netplan")
    (tmp_path / "etc/netplan").mkdir(parents=True)
    (tmp_path / "etc/netplan/50-cloud.yaml").write_text("network: {version: 2}\n")
    plan = fabric_config.plan(netdev(), "192.168.192.1/24", 9000, NOT_KEPT, tmp_path)

    assert (plan.file, plan.mode, plan.apply) == ("etc/netplan/60-gb10-fabric.yaml", 0o600, (("netplan", "apply"),))
    assert 'enp1s0f0np0:\n      mtu: 9000\n      addresses: ["192.168.192.1/24"]' in plan.text


@pytest.mark.parametrize(
    ("found", "kept", "writes", "applies"),
    [
        (netdev("e", "192.168.192.1/24", mtu=9000), {"file": "x", "mtu": 9000}, False, False),
        (netdev("e", "192.168.192.1/24", mtu=1500), {"file": "x", "mtu": 9000}, False, True),
        (netdev("e", "192.168.192.1/24", mtu=9000), {"file": "x", "mtu": 0}, True, True),
        (netdev("e", "192.168.192.1/24", mtu=9000), {"file": "", "mtu": 0}, True, True),
        (netdev("e", "192.168.192.1/16", mtu=9000), {"file": "x", "mtu": 9000}, False, True),
    ],
)
def test_only_what_is_missing_is_done(tmp_path, found, kept, writes, applies):
    plan = fabric_config.plan(found, "192.168.192.1/24", 9000, kept, tmp_path)

    assert (bool(plan.file), bool(plan.apply)) == (writes, applies)


def carry_out(
    root: Path, answers: dict[str, subprocess.CompletedProcess[str]], after: roce.Netdev, **more: object
) -> None:
    plan = fabric_config.plan(netdev(), "192.168.192.1/24", 9000, NOT_KEPT, root)
    (root / plan.file).parent.mkdir(parents=True, exist_ok=True)
    fabric_config.carry_out(
        plan,
        "enp1s0f0np0",
        "192.168.192.1/24",
        9000,
        root=root,
        netdevs=lambda: [after],
        run=lambda command: answers.get(command[1], done()),
        **more,  # type: ignore[arg-type]
    )


def test_file_is_written_and_the_result_awaited(tmp_path):
    carry_out(tmp_path, {}, netdev("enp1s0f0np0", "192.168.192.1/24", mtu=9000))

    assert (tmp_path / fabric_config.NETWORKD_FILE).read_text().startswith("[Match]\nName=enp1s0f0np0\n")


@pytest.mark.parametrize(
    ("answers", "after", "error"),
    [
        ({}, netdev(), "MTU 1500,  after 0 s; wanted MTU 9000, 192.168.192.1/24"),
        ({}, netdev("other"), "no such interface after 0 s"),
        ({"reload": done(1)}, netdev(), "networkctl reload failed: no such unit"),
    ],
)
def test_configuration_that_does_not_take_is_an_error(tmp_path, answers, after, error):
    with pytest.raises(fabric_config.ConfigError, match=error):
        carry_out(tmp_path, answers, after, wait_s=0)


def test_running_engine_is_left_alone(tmp_path):
    with pytest.raises(fabric_config.ConfigError, match=r"vllm-rank\.service is running and would lose"):
        carry_out(tmp_path, {"is-active": done(stdout="active\n")}, netdev(), busy_units=["vllm-rank.service"])
    assert not (tmp_path / fabric_config.NETWORKD_FILE).exists()
