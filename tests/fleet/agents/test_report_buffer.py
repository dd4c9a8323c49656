"""The buffer of latest reports: newer reports are never overwritten, and none is lost between two writes."""

from dataclasses import dataclass, replace

import pytest

from fleet.agents.consumers.handlers import BATCH, ReportBuffer


@dataclass(frozen=True)
class Received:
    connection: str
    text: str


def ended(report: Received) -> Received:
    return replace(report, text="gone")


@pytest.fixture
def reports() -> ReportBuffer[Received]:
    return ReportBuffer()


def test_the_latest_report_is_taken_once(reports: ReportBuffer[Received]) -> None:
    reports.put("a", Received("k", "1"))
    reports.put("a", Received("k", "2"))
    assert reports.take() == {"a": Received("k", "2")}
    assert reports.take() == {}


def test_putting_a_report_returns_the_previous_one(reports: ReportBuffer[Received]) -> None:
    assert reports.put("a", Received("k", "1")) is None
    reports.take()
    assert reports.put("a", Received("k", "2")) == Received("k", "1")


def test_what_could_not_be_written_comes_again_unless_there_is_newer(reports: ReportBuffer[Received]) -> None:
    reports.put("a", Received("k", "1")), reports.put("b", Received("k", "1"))

    def broken(_: list[Received]) -> None:
        reports.put("a", Received("k", "2"))
        raise OSError

    with pytest.raises(OSError):  # noqa: PT011 - it has no text
        reports.flush(broken)
    assert reports.take() == {"a": Received("k", "2"), "b": Received("k", "1")}


def test_what_was_written_does_not_come_again(reports: ReportBuffer[Received]) -> None:
    reports.put("a", Received("k", "1"))
    written: list[Received] = []

    reports.flush(written.extend)
    reports.flush(written.extend)
    assert written == [Received("k", "1")]


def test_a_storm_is_written_in_batches_and_only_the_newest_report_of_each_agent(
    reports: ReportBuffer[Received],
) -> None:
    for number in range(2 * BATCH + 1):
        reports.put(str(number), Received("k", "first"))
    written: list[list[Received]] = []

    def store(batch: list[Received]) -> None:
        written.append(batch)
        for agent in ("0", str(2 * BATCH)):  # one stored, one waiting
            reports.put(agent, Received("k", f"during batch {len(written)}"))

    reports.flush(store)
    assert [len(batch) for batch in written] == [BATCH, BATCH, 1]
    assert written[2] == [Received("k", "during batch 2")]
    assert reports.take().keys() == {"0", str(2 * BATCH)}


def test_batches_that_were_written_before_one_failed_do_not_come_again(reports: ReportBuffer[Received]) -> None:
    for number in range(2 * BATCH):
        reports.put(str(number), Received("k", "1"))
    written: list[Received] = []

    def fails_once(batch: list[Received]) -> None:
        if written:
            raise OSError
        written.extend(batch)

    with pytest.raises(OSError):  # noqa: PT011 - it has no text
        reports.flush(fails_once)
    assert list(reports.take()) == [str(number) for number in range(BATCH, 2 * BATCH)]


def test_a_connection_that_ends_has_a_final_report(reports: ReportBuffer[Received]) -> None:
    reports.put("a", Received("k", "1"))
    reports.end("a", "k", ended)
    reports.end("a", "k", ended)
    assert reports.take() == {"a": Received("k", "gone")}
    assert reports.put("a", Received("k2", "1")) is None


def test_the_end_of_an_older_connection_changes_nothing_of_the_newer(reports: ReportBuffer[Received]) -> None:
    reports.put("a", Received("new", "1"))
    reports.end("a", "old", ended)
    assert reports.take() == {"a": Received("new", "1")}


def test_a_connection_that_never_reported_has_no_final_report(reports: ReportBuffer[Received]) -> None:
    reports.end("a", "k", ended)
    assert reports.take() == {}
