"""The journal returns what was stored, survives damage, and keeps unreadable files."""

import stat
from pathlib import Path

import pytest

from engine_agent.node.journal import CorruptJournal, Journal
from engine_agent.protocol.ingress_messages import Pool, RoutingTable

TABLE = RoutingTable(revision=7, region="us-east-1", pools=(Pool("p", ("m",), "realtime", (), (), {"us-east-1": 1.0}),))


def journal(home: Path) -> Journal[RoutingTable]:
    return Journal(home / "sub" / "journal.json", RoutingTable)


def test_a_journal_that_was_never_written_is_empty(tmp_path: Path) -> None:
    assert journal(tmp_path).load() is None


def test_what_was_saved_is_loaded_and_only_the_owner_may_read_it(tmp_path: Path) -> None:
    journal(tmp_path).save(TABLE)
    assert journal(tmp_path).load() == TABLE
    assert stat.S_IMODE((tmp_path / "sub" / "journal.json").stat().st_mode) == 0o600
    assert [path.name for path in (tmp_path / "sub").iterdir()] == ["journal.json"]


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b'{"type":"routing_table","revision":"x"}'])
def test_a_damaged_journal_is_named_set_aside_and_then_gone(tmp_path: Path, content: bytes) -> None:
    journal(tmp_path).save(TABLE)
    path = tmp_path / "sub" / "journal.json"
    path.write_bytes(content)
    with pytest.raises(CorruptJournal, match=r"journal\.json is damaged") as caught:
        journal(tmp_path).load()
    assert caught.value.kept_as.read_bytes() == content
    assert journal(tmp_path).load() is None


def test_a_failed_save_leaves_the_earlier_record(tmp_path: Path) -> None:
    journal(tmp_path).save(TABLE)
    with pytest.raises(TypeError):
        journal(tmp_path).save(object())  # type: ignore[arg-type]
    assert journal(tmp_path).load() == TABLE
