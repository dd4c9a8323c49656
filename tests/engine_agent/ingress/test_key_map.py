"""What a routing table says of keys, as entries of a map; and which keys no ingress takes."""

from typing import Any

import msgspec
import pytest

from engine_agent.ingress.bad_table import BadTable
from engine_agent.ingress.key_map import CONTENT_ENTRY, NEVER, REQUIRED_ENTRY, key_entries
from engine_agent.protocol.ingress_messages import ApiKey, RoutingTable

DIGEST = "ab" * 32
KEY = ApiKey("0a1b2c3d", DIGEST, "rufus", "near_realtime", ("chat", "gone"), 1795000000.5, 60, 9000, 4)
BACKENDS = {"chat": "pool.chat", "other": "pool.other"}


def entries(*keys: ApiKey, required: bool = False) -> dict[str, str]:
    return key_entries(RoutingTable(1, "east", (), keys=keys, keys_required=required), BACKENDS)


def test_a_key_is_found_by_its_digest_and_opens_the_pools_that_are_here() -> None:
    there = entries(KEY)
    assert there[DIGEST] == "0a1b2c3d|rufus|1|1795000000|60|9000|4|1|1|0|0"
    assert there["0a1b2c3d/pool.chat"] == "1"
    assert len(there) == 4
    assert KEY.prefix not in there


def test_a_key_without_limits_pools_and_expiry_says_so() -> None:
    open_key = ApiKey("0a1b2c3d", DIGEST, "rufus", "realtime")
    assert entries(open_key)[DIGEST] == f"0a1b2c3d|rufus|0|{NEVER}|0|0|0|0|0|0|0"


def test_what_the_sender_shows_is_the_same_key_but_never_realtime() -> None:
    sender, there = "cd" * 32, {}
    for serving_class, urgency in (("realtime", 1), ("near_realtime", 1), ("batch", 2)):
        there = entries(msgspec.structs.replace(KEY, serving_class=serving_class, sender_digest=sender))
        assert there[sender] == f"0a1b2c3d|rufus|{urgency}|1795000000|60|9000|4|1|1|1|0"
        assert there[DIGEST].endswith(f"|{sender}|0")
    assert len(there) == 5


def test_every_key_of_a_tenant_over_its_quota_says_so_the_senders_text_too() -> None:
    key, other = msgspec.structs.replace(KEY, sender_digest="cd" * 32), ApiKey("0d0d0d0d", "ef" * 32, "ada", "realtime")
    table = RoutingTable(1, "east", (), keys=(key, other), tenants_over_quota=("rufus", "nobody"))
    there = key_entries(table, BACKENDS)
    assert [there[digest].rpartition("|")[2] for digest in (DIGEST, "cd" * 32, "ef" * 32)] == ["1", "1", "0"]


def test_equal_keys_give_one_mark_and_any_change_another() -> None:
    changes: list[dict[str, Any]] = [{"tenant": "other"}, {"requests_per_min": 61}, {"pools": ()}, {"expires_at": None}]
    marks = {entries(msgspec.structs.replace(KEY, **change))[CONTENT_ENTRY] for change in changes}
    marks |= {entries()[CONTENT_ENTRY], entries(required=True)[CONTENT_ENTRY]}
    assert len(marks) == len(changes) + 2
    assert entries(KEY)[CONTENT_ENTRY] == entries(KEY)[CONTENT_ENTRY]
    assert entries(KEY)[CONTENT_ENTRY] not in marks


def test_origins_are_entries_of_their_key_and_of_all() -> None:
    there = entries(msgspec.structs.replace(KEY, origins=("https://app.example", "http://[::1]:3000")))
    assert there["0a1b2c3d@https://app.example"] == there[".any@http://[::1]:3000"] == "1"
    assert len(there) == len(entries(KEY)) + 4


def test_whether_keys_are_required_is_an_entry() -> None:
    assert (entries()[REQUIRED_ENTRY], entries(required=True)[REQUIRED_ENTRY]) == ("0", "1")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prefix": "Xy"}, "prefix and digest must be lower-case hexadecimal"),
        ({"digest": "ab"}, "prefix and digest must be lower-case hexadecimal"),
        ({"origins": ("https://app.example/path",)}, "it must be like https://app.example:8443"),
        ({"origins": ("*",)}, "it must be like https://app.example:8443"),
        ({"origins": ("https://a b",)}, "it must be like https://app.example:8443"),
        ({"sender_digest": "ab"}, "prefix and digest must be lower-case hexadecimal"),
        ({"sender_digest": DIGEST}, "digest abab.* is of two keys"),
        ({"tenant": "a b"}, "tenant 'a b' of key 0a1b2c3d"),
        ({"tenant": "~others"}, "tenant '~others' of key 0a1b2c3d"),
        ({"serving_class": "soon"}, "serving class 'soon' of key 0a1b2c3d is none of realtime, near_realtime, batch"),
        ({"tokens_per_min": -1}, "limits of key 0a1b2c3d must be between 0"),
        ({"max_concurrent": 2**31}, "limits of key 0a1b2c3d must be between 0"),
    ],
)
def test_a_key_that_cannot_be_meant_refuses_the_table(change: dict[str, Any], said: str) -> None:
    with pytest.raises(BadTable, match=said):
        entries(msgspec.structs.replace(KEY, **change))


def test_two_keys_of_one_prefix_or_digest_refuse_the_table() -> None:
    with pytest.raises(BadTable, match="prefix 0a1b2c3d is of two keys"):
        entries(KEY, msgspec.structs.replace(KEY, digest="cd" * 32))
    with pytest.raises(BadTable, match=r"digest (ab){32} is of two keys"):
        entries(KEY, msgspec.structs.replace(KEY, prefix="0a0a0a0a"))
