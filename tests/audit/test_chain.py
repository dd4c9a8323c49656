"""What breaks a chain, told from plain records."""

import dataclasses
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, timezone

import pytest

from audit.record_format import START, first_break, record_digest


@dataclass(frozen=True)
class Record:
    number: int
    previous: str
    digest: str = ""
    at: datetime = datetime(2026, 11, 21, 12, tzinfo=UTC)
    outcome: str = "done"
    actor: str = "ada"
    proof: str = "token"
    address: str = ""
    token_prefix: str = ""
    action: str = "node.cordon"
    object: str = "node/n-1"
    about: list[str] = field(default_factory=list)
    reason: str = ""
    request_id: str = ""
    changes: str = "{}"


def chain(length: int) -> list[Record]:
    made: list[Record] = []
    for number in range(1, length + 1):
        bare = Record(number, made[-1].digest if made else START)
        made.append(dataclasses.replace(bare, digest=record_digest(bare)))
    return made


def test_an_untouched_chain_holds() -> None:
    records = chain(4)
    assert first_break(records, after=0, digest=START) == (None, 4, records[-1].digest)


@pytest.mark.parametrize(
    "change",
    [{"actor": "eve"}, {"at": datetime(2026, 11, 21, 13, tzinfo=UTC)}, {"about": ["x"]}, {"changes": "{ }"}],
    ids=lambda change: next(iter(change)),
)
def test_a_changed_column_breaks_its_record(change: dict[str, object]) -> None:
    records = chain(4)
    records[1] = dataclasses.replace(records[1], **change)  # type: ignore[arg-type]
    broken, last_good, _ = first_break(records, after=0, digest=START)
    assert broken is not None
    assert (broken.number, last_good) == (2, 1)


def test_a_record_rewritten_with_its_digest_breaks_the_next() -> None:
    records = chain(4)
    forged = dataclasses.replace(records[1], actor="eve")
    records[1] = dataclasses.replace(forged, digest=record_digest(forged))
    broken, *_ = first_break(records, after=0, digest=START)
    assert broken is not None
    assert broken.number == 3


def test_a_missing_record_is_named() -> None:
    records = chain(4)
    del records[2]
    broken, *_ = first_break(records, after=0, digest=START)
    assert broken is not None
    assert (broken.number, "missing" in broken.why) == (3, True)


def test_a_chain_whose_beginning_was_let_go_holds_from_there() -> None:
    records = chain(4)
    assert first_break(records[2:], after=2, digest=records[1].digest)[0] is None


def test_the_same_moment_has_one_digest_in_every_time_zone() -> None:
    here = Record(1, START, at=datetime(2026, 11, 21, 14, tzinfo=timezone(timedelta(hours=2))))
    assert record_digest(here) == record_digest(Record(1, START))
