"""The printed story of `make demo`."""

from datetime import UTC, datetime, timedelta

from bench.fleet.demo import LINES_EACH, Chapter, summary, told
from lab.steady_load import Answer

BEGAN = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)


def chapter(*events: tuple[float, str, str], answers: tuple[Answer, ...] = ()) -> Chapter:
    rows = tuple(
        {"at": (BEGAN + timedelta(seconds=after_s)).isoformat(), "kind": kind, "message": message}
        for after_s, kind, message in events
    )
    return Chapter("A node dies", BEGAN.timestamp(), BEGAN.timestamp() + 5, rows, answers, ("/incidents/7/",))


def test_events_are_told_with_their_time_since_the_fault() -> None:
    lines = list(told(chapter((0.2, "node.lost", "n-1 is lost"), (4.9, "cell.ready", "c-1 is ready"))))
    assert [line.split("T+")[1] for line in lines[:2]] == ["  0.2 s  n-1 is lost", "  4.9 s  c-1 is ready"]
    assert lines[2] == "  over after 5.0 s; 0 requests, 0 failed"
    assert lines[-1].endswith("/incidents/7/")


def test_failed_requests_are_counted_and_named() -> None:
    answers = (Answer(0.0, cell="c-1"), Answer(0.0, cell="c-1", error="the stream ended"), Answer(0.0, error="refused"))
    story = chapter(answers=answers)
    lines = list(told(story))
    assert lines[:3] == [
        "  over after 5.0 s; 3 requests, 2 failed",
        "  failed, from c-1: the stream ended",
        "  failed, from no cell: refused",
    ]
    assert summary([story]).splitlines()[-1] == "| A node dies | 5.0 | 3 | 2 |"


def test_a_long_story_is_cut_and_says_how_much_is_missing() -> None:
    lines = list(told(chapter(*((1.0, "cell.lost", "c-1 is lost") for _ in range(LINES_EACH + 3)))))
    assert "  and 3 more: " in lines[LINES_EACH]


def test_events_of_other_subjects_are_left_out() -> None:
    assert "key" not in "".join(told(chapter((1.0, "key.created", "key created"))))
