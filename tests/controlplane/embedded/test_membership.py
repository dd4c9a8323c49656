"""What a host keeps of its control plane, and the file by which another one comes to know it."""

import json
import re
import stat
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from controlplane.embedded.bundle import Bundle, read_bundle, this_release, write_bundle
from controlplane.embedded.configuration import CannotStart, read_configuration
from controlplane.embedded.database_link import configuration
from controlplane.embedded.host_keeper import DATABASE_FILE
from controlplane.embedded.membership import (
    MEMBERSHIP_FILE,
    Membership,
    forget_membership,
    membership_of,
    read_membership,
    write_membership,
)
from controlplane.embedded.process_environment import LOOPBACK_NAMES, control_plane_environment
from controlplane.embedded.state_directory import Secrets, write_private_json
from controlplane.embedded.status import host_lines
from tests.controlplane.embedded.control_hosts import membership_pair
from tests.controlplane.embedded.processes import prepared_home

FIRST, SECOND = membership_pair()
NOW_S = 1_800_000_000.0


def bundle() -> Bundle:
    return Bundle(this_release(), NOW_S, NOW_S + 60, Secrets("key", "password"), "token", SECOND)


def test_a_home_keeps_it_for_its_owner_alone_and_forgets_it(tmp_path: Path) -> None:
    home = prepared_home(tmp_path / "home")
    assert read_membership(home) is None
    write_membership(home, FIRST.with_joined("control-2"))
    kept = read_membership(home)
    assert kept == FIRST.with_joined("control-2")
    assert kept.other.joined
    assert stat.S_IMODE((home.path / MEMBERSHIP_FILE).stat().st_mode) == 0o600
    forget_membership(home)
    assert read_membership(home) is None


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"hosts": []}, "its hosts are not control-1 and control-2"),
        ({"own_name": "control-3"}, "its hosts are not control-1 and control-2"),
        ({"passwords": {}}, "no usable 'owner'"),
        ({"shared": {"A": 1}}, "shared variables are not all text"),
        ({"key": None}, "no usable 'key'"),
        ({"hosts": [{**asdict(FIRST.own), "address": "10.0.0.1 }"}, asdict(FIRST.other)]}, "does not appear to be"),
    ],
)
def test_a_damaged_one_is_refused_by_name(tmp_path: Path, change: dict[str, object], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        membership_of(json.loads(json.dumps({**asdict(FIRST), **change})))
    home = prepared_home(tmp_path / "home")
    (home.path / MEMBERSHIP_FILE).write_text(json.dumps({**asdict(FIRST), **change}))
    with pytest.raises(CannotStart, match="is damaged"):
        read_membership(home)


def test_a_bundle_is_for_its_owner_alone_and_says_what_was_put_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: NOW_S + 59)
    write_bundle(tmp_path / "c2.bundle", bundle())
    assert stat.S_IMODE((tmp_path / "c2.bundle").stat().st_mode) == 0o600
    assert read_bundle(tmp_path / "c2.bundle") == bundle()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "is no bundle for a control host"),
        ("", "is no bundle for a control host"),
        ("[]", "does not say that it is one"),
        ('{"kind": "switchyard control host", "format": 2}', "has format 2, and this release reads 1"),
        ('{"kind": "switchyard control host", "format": 1, "format": 1}', "is no bundle"),
        ('{"kind": "switchyard control host", "format": 1}', "it lacks 'release'"),
        (" " * 300_000, "it is too large"),
    ],
)
def test_what_is_no_bundle_is_one_sentence_that_says_how_to_make_one(
    tmp_path: Path, text: str | None, expected: str
) -> None:
    path = tmp_path / "c2.bundle"
    if text is not None:
        path.write_text(text)
    with pytest.raises(CannotStart, match=expected) as refused:
        read_bundle(path)
    assert "embedded invite" in str(refused.value)


def test_a_bundle_of_another_release_or_of_yesterday_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "c2.bundle"
    monkeypatch.setattr(time, "time", lambda: NOW_S + 120)
    write_bundle(path, bundle())
    with pytest.raises(CannotStart, match=r"was made 2 minutes ago and has expired: make a new one by `invite`"):
        read_bundle(path)
    write_bundle(path, replace(bundle(), release="0123456789ab"))
    with pytest.raises(CannotStart, match=rf"of another release \(0123456789ab; this checkout is {this_release()}\)"):
        read_bundle(path)


def environment_of(membership: Membership, **inherited: str) -> dict[str, str]:
    return control_plane_environment(
        inherited,
        read_configuration(inherited),
        Secrets("key", "password"),
        database_url="postgres://",
        redis_url="unix://",
        membership=membership,
    )


@pytest.mark.parametrize(
    ("shared", "inherited", "expected"),
    [
        ("switchyard.example", {}, "switchyard.example,10.0.0.1,10.0.0.2"),
        ("switchyard.example", {"SWITCHYARD_ALLOWED_HOSTS": ""}, "switchyard.example,10.0.0.1,10.0.0.2"),
        ("switchyard.example", {"SWITCHYARD_ALLOWED_HOSTS": "own.example"}, "own.example,10.0.0.1,10.0.0.2"),
        ("", {}, f"{LOOPBACK_NAMES},10.0.0.1,10.0.0.2"),
    ],
)
def test_the_second_host_answers_by_the_names_of_the_first_unless_it_states_its_own(
    shared: str, inherited: dict[str, str], expected: str
) -> None:
    named = {**SECOND.shared, "SWITCHYARD_ALLOWED_HOSTS": shared}
    environment = environment_of(replace(SECOND, shared=named), **inherited)
    assert environment["SWITCHYARD_ALLOWED_HOSTS"] == expected
    assert environment["SWITCHYARD_URL"] == "https://switchyard.example"


def test_processes_of_either_host_name_both_to_agents() -> None:
    assert environment_of(SECOND)["SWITCHYARD_AGENT_URL"] == "https://10.0.0.1:8443,https://10.0.0.2:8443"


def test_addresses_of_version_6_stand_in_brackets_in_names_and_in_the_link(tmp_path: Path) -> None:
    first, second = membership_pair(("fd00::1", "fd00::2"))
    assert environment_of(second)["SWITCHYARD_ALLOWED_HOSTS"] == f"{LOOPBACK_NAMES},[fd00::1],[fd00::2]"
    assert "bind [fd00::1]:5432" in configuration(first, tmp_path / "link", tmp_path / "sockets")


def test_the_link_admits_the_other_host_and_nobody_else(tmp_path: Path) -> None:
    text = configuration(FIRST, tmp_path / "link", tmp_path / "sockets")
    assert "bind 10.0.0.1:5432" in text
    assert "verify required" in text
    assert "tcp-request session reject unless { ssl_c_s_dn(cn) -m str control-2 }" in text
    assert "verifyhost control-2.database.switchyard" in text
    assert text.count("ssl-min-ver TLSv1.3") == 2
    assert "tcp-request connection reject unless { src 10.0.0.2 }" in text
    roles = [bytes.fromhex(word) for word in re.findall(r"\b7573657200[0-9A-F]+\b", text)]
    assert roles == [b"user\0switchyard_application\0", b"user\0switchyard_replication\0"]


def test_status_names_both_hosts_and_what_became_of_this_ones_database(tmp_path: Path) -> None:
    home = prepared_home(tmp_path / "home")
    assert host_lines(home) == []
    write_membership(home, SECOND)
    write_private_json(home.path / DATABASE_FILE, {"state": "standby", "text": "its database is the standby"})
    assert host_lines(home) == [
        "Control hosts: control-2 at 10.0.0.2, which is this one, and control-1 at 10.0.0.1",
        "  control-2: its database is the standby",
    ]
