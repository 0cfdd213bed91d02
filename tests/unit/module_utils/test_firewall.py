from __future__ import annotations

import pytest
from ansible.module_utils.gb10.firewall import (
    FirewallError,
    Rule,
    State,
    check_ssh_source,
    connection,
    network,
    parse_added,
    parse_defaults,
    plan,
    plan_absent,
    wanted_rules,
)

# Captured from ufw 0.36.2 on Debian 12.
ADDED = """\
Added user rules (see 'ufw status' for running firewall):
ufw allow 22/tcp comment 'gb10: ssh'
ufw allow from 198.18.1.0/24 to 198.18.1.0/24 comment 'gb10: fabric'
ufw allow from 198.18.0.0/24 to any port 8000,8443 proto tcp comment 'gb10: api'
ufw deny 9100/tcp
ufw allow from 10.0.0.5 to any port 9100 proto tcp comment 'monitoring'
"""
OURS, OTHERS = parse_added(ADDED)
DEFAULTS = 'IPV6=yes\nDEFAULT_INPUT_POLICY="DROP"\nDEFAULT_FORWARD_POLICY="DROP"\n'


def rules():
    return wanted_rules(["198.18.1.0/24"], [22], ["any"], [8443, 8000], ["198.18.0.0/24"])


def test_ours_are_told_from_the_operators():
    assert len(OURS) == 3
    assert OTHERS == ["deny 9100/tcp", "allow from 10.0.0.5 to any port 9100 proto tcp"]


def test_wanted_rules_read_as_ufw_prints_them():
    assert [rule.words for rule in rules()] == OURS


def test_nothing_is_done_twice():
    assert plan(State(True, "deny", True, OURS, OTHERS), rules(), 90) == []


NETWORKS = [
    ("any", "any"),
    ("192.0.2.5/32", "192.0.2.5"),
    ("192.0.2.5", "192.0.2.5"),
    ("192.0.2.5/24", "192.0.2.0/24"),
    ("2001:db8::1/128", "2001:db8::1"),
    ("2001:DB8::/32", "2001:db8::/32"),
]


@pytest.mark.parametrize(("given", "printed"), NETWORKS)
def test_a_network_is_written_as_ufw_prints_it(given, printed):
    assert network(given) == printed


@pytest.mark.parametrize("wrong", ["office", "192.0.2.0/33", "", "192.0.2.5; reboot"])
def test_what_is_no_network_is_refused(wrong):
    with pytest.raises(FirewallError, match="neither 'any' nor an address"):
        network(wrong)


POLICIES = [
    (DEFAULTS, ("deny", True)),
    (DEFAULTS.replace("DROP", "ACCEPT").replace("yes", "no"), ("allow", False)),
    (DEFAULTS.replace("DROP", "REJECT"), ("reject", True)),
    ("", ("unknown", False)),
]


@pytest.mark.parametrize(("text", "wanted"), POLICIES)
def test_policy_and_ipv6_are_read(text, wanted):
    assert parse_defaults(text) == wanted


def test_ssh_comes_first_the_way_back_before_the_lock_and_the_lock_last():
    steps = [" ".join(step) for step in plan(State(input_policy="allow", ipv6=False), rules(), 60)]
    assert steps[0].startswith("sed -i s/^IPV6=")
    assert steps[1] == "ufw prepend allow 22/tcp comment gb10: ssh"
    back = next(index for index, step in enumerate(steps) if step.startswith("systemd-run --on-active=60"))
    assert steps[back].endswith("sh -c ufw --force disable")
    assert back < steps.index("ufw default deny incoming") < steps.index("ufw --force enable") == len(steps) - 1


def test_an_active_firewall_that_lets_all_in_goes_back_to_that_and_is_not_switched_off():
    steps = [" ".join(step) for step in plan(State(True, "allow", True, OURS), rules(), 60)]
    assert steps == [
        "systemd-run --on-active=60 --unit=gb10-firewall-rollback --collect --quiet sh -c ufw default allow incoming",
        "ufw default deny incoming",
    ]


def test_a_rule_of_ours_that_is_no_longer_wanted_goes_the_operators_stay():
    steps = plan(State(True, "deny", True, OURS, OTHERS), rules()[:2], 90)
    assert [" ".join(step) for step in steps] == ["ufw delete allow from 198.18.0.0/24 to any port 8000,8443 proto tcp"]


def test_a_firewall_that_leaves_ipv6_open_is_refused():
    with pytest.raises(FirewallError, match="IPV6=no"):
        plan(State(True, "deny", False), rules(), 90)


ABSENT = [
    (State(True, "deny", True, ["allow 22/tcp"], [], {"active": False, "input_policy": "allow"}),
     ["ufw --force disable", "ufw default allow incoming", "ufw delete allow 22/tcp"]),
    (State(True, "deny", True, ["allow 22/tcp"], [], {"active": True, "input_policy": "deny"}),
     ["ufw delete allow 22/tcp"]),
    (State(False, "deny", True), []),
]  # fmt: skip


@pytest.mark.parametrize(("state", "steps"), ABSENT)
def test_undo_gives_back_what_was_there(state, steps):
    assert [" ".join(step) for step in plan_absent(state)] == steps


def test_the_connection_is_found_above_sudo(tmp_path, monkeypatch):
    for pid, parent, environ in (
        (50, 40, "A=b\0"),
        (40, 30, ""),
        (30, 1, "X=y\0SSH_CONNECTION=192.0.2.9 5 192.0.2.1 2222\0"),
    ):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "environ").write_text(environ)
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a ) b) S {parent} 1 1")
    monkeypatch.setattr("os.getpid", lambda: 50)
    assert connection(tmp_path) == ("192.0.2.9", 2222)
    monkeypatch.setattr("os.getpid", lambda: 60)
    assert connection(tmp_path) is None


def test_a_run_that_would_lock_itself_out_is_refused():
    check_ssh_source(("192.0.2.9", 22), ["192.0.2.0/24"])
    check_ssh_source(("192.0.2.9", 22), ["10.0.0.0/8", "any"])
    check_ssh_source(None, ["10.0.0.0/8"])
    with pytest.raises(FirewallError, match=r"from 192\.0\.2\.9, which host_firewall_ssh_from \(10\.0\.0\.0/8\)"):
        check_ssh_source(("192.0.2.9", 22), ["10.0.0.0/8"])
    with pytest.raises(FirewallError, match="nobody could log in"):
        check_ssh_source(None, [])


def test_without_ports_every_protocol_is_meant():
    assert Rule("fabric", "198.18.1.0/24", "198.18.1.0/24").words == "allow from 198.18.1.0/24 to 198.18.1.0/24"
