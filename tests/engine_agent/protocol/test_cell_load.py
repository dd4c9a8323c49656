"""Which health answers of cells an ingress uses: bounded, typed, of its version."""

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_agent.protocol.proxy_messages import (
    LOAD_VERSION,
    MAX_HEALTH_BYTES,
    BadLoad,
    CellLoad,
    HealthAnswer,
    decode_load,
)

LOAD = CellLoad(LOAD_VERSION, "c-1-g3", own=2, in_flight=7, waiting=1, running=6, kv_percent=41.5)
WIRE = b'{"ok":true,"load":%b}'


def test_a_load_survives_the_wire() -> None:
    assert decode_load(msgspec.json.encode(HealthAnswer(ok=True, load=LOAD))) == LOAD


@pytest.mark.parametrize(
    "body", [b"{}", b'{"ok":true}', b'{"ok":true,"load":null}', WIRE % b'{"version":2,"places":"many"}']
)
def test_a_cell_without_a_load_of_this_version_has_none(body: bytes) -> None:
    assert decode_load(body) is None


@pytest.mark.parametrize(
    "load",
    [
        *(b"7", b"[]", b"{}", b'{"version":1}', b'{"version":1,"server":"c","own":0}'),
        b'{"version":1,"server":"c","own":-1,"in_flight":0}',
        b'{"version":1,"server":"c","own":0,"in_flight":1000001}',
        b'{"version":1,"server":"c","own":0,"in_flight":1.5}',
        b'{"version":1,"server":"c","own":0,"in_flight":0,"kv_percent":101}',
        b'{"version":1,"server":"c","own":0,"in_flight":0,"kv_percent":NaN}',
        b'{"version":1,"server":"c","own":0,"in_flight":0,"weight":256}',
    ],
)
def test_a_load_out_of_bounds_is_refused(load: bytes) -> None:
    with pytest.raises(BadLoad):
        decode_load(WIRE % load)


def test_a_long_answer_is_refused_unread() -> None:
    with pytest.raises(BadLoad, match="1024 at most"):
        decode_load(b" " * (MAX_HEALTH_BYTES + 1))


@given(st.binary(max_size=200))
def test_any_other_answer_is_no_load(body: bytes) -> None:
    with contextlib.suppress(BadLoad):
        assert decode_load(body) is None
