"""Names in certificates are written and parsed back; other texts are rejected."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_agent.protocol.identity import (
    BadName,
    IdentityKind,
    IdentityName,
    control_name,
    name_of_peer,
    name_of_uri,
)

FLEET = "f-0123abcd"
NAME = IdentityName(FLEET, IdentityKind.NODE, "n-1")
names = st.builds(
    IdentityName,
    st.from_regex(r"f-[0-9a-f]{8}", fullmatch=True),
    st.sampled_from(IdentityKind),
    st.from_regex(r"[a-z0-9]([a-z0-9_-]{0,43}[a-z0-9_])?", fullmatch=True),
)


@given(names)
def test_a_name_is_read_back_from_its_uri(name: IdentityName) -> None:
    assert name_of_uri(name.uri) == name
    assert len(name.dns) <= 64


def test_the_forms_are_what_other_programs_check() -> None:
    assert (NAME.uri, NAME.dns) == (f"spiffe://{FLEET}/node/n-1", f"n-1.node.{FLEET}")
    assert control_name(FLEET).dns == f"control.control.{FLEET}"


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "n-1",
        f"http://{FLEET}/node/n-1",
        f"spiffe://{FLEET}/node",
        f"spiffe://{FLEET}/node/",
        f"spiffe://{FLEET}/node/n-1/more",
        f"spiffe://{FLEET}/node/n-1?query",
        f"spiffe://{FLEET}/node/N-1",
        f"spiffe://{FLEET}/root/n-1",
        f"spiffe://{FLEET}/node/n-1\n",
        f"spiffe://{FLEET}/node/n-1\x00",
        f"SPIFFE://{FLEET}/node/n-1",
        "spiffe://f-0123abc/node/n-1",
        f"spiffe://{FLEET}/node/" + "a" * 46,
    ],
)
def test_what_is_no_spiffe_id_of_a_fleet_is_refused(uri: str) -> None:
    with pytest.raises(BadName, match="is not a name in a fleet's certificates; the form is spiffe://FLEET/KIND/ID"):
        name_of_uri(uri)


@pytest.mark.parametrize("bad", ["", "A", "a.b", "-a", "a" * 46, "é"])
def test_an_id_that_no_certificate_may_have_is_refused_by_name(bad: str) -> None:
    with pytest.raises(BadName, match="an id has 1 to 45 lower-case letters"):
        IdentityName(FLEET, IdentityKind.NODE, bad)


def _certificate(*names: tuple[str, str]) -> dict[str, tuple[tuple[str, str], ...]]:
    return {"subjectAltName": names}


def test_a_peer_is_whom_both_of_its_names_say() -> None:
    assert name_of_peer(_certificate(("URI", NAME.uri), ("DNS", NAME.dns))) == NAME


@pytest.mark.parametrize(
    "certificate",
    [
        None,
        {},
        _certificate(),
        _certificate(("DNS", NAME.dns)),
        _certificate(("URI", NAME.uri)),
        _certificate(("URI", NAME.uri), ("DNS", f"n-2.node.{FLEET}")),
        _certificate(("URI", NAME.uri), ("DNS", NAME.dns), ("DNS", "*")),
        _certificate(("URI", NAME.uri), ("URI", f"spiffe://{FLEET}/node/n-2"), ("DNS", NAME.dns)),
    ],
)
def test_a_peer_with_no_name_or_two_is_nobody(certificate: dict[str, object] | None) -> None:
    with pytest.raises(BadName):
        name_of_peer(certificate)
