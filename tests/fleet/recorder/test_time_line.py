"""Time lines: spans between changes, cut at the ends of the shown time."""

from datetime import timedelta

from fleet.recorder.planning.time_line import Change, Seen, Span, cell_spans, lanes_of, load_spans, states_of
from kernel.tones import Tone
from tests.fleet.fleets import NOW, ago


def test_a_state_lasts_until_the_next_one_and_repetitions_are_one() -> None:
    changes = [
        Change(ago(300), "starting", Tone.MOVING, "placed"),
        Change(ago(200), "ready", Tone.OK),
        Change(ago(150), "ready", Tone.OK, "still"),
        Change(ago(100), "lost", Tone.BAD),
    ]
    spans = states_of(changes)
    assert [(one.label, one.start, one.end) for one in spans] == [
        ("starting", ago(300), ago(200)),
        ("ready", ago(200), ago(100)),
        ("lost", ago(100), None),
    ]


def test_bars_are_cut_at_the_ends_and_never_too_narrow_to_see() -> None:
    spans = [
        Span("over", Tone.OK, ago(400), ago(301)),
        Span("ready", Tone.OK, ago(400), ago(200)),
        Span("blink", Tone.BAD, ago(200), ago(200)),
        Span("lost", Tone.BAD, ago(100)),
        Span("later", Tone.OK, NOW + timedelta(seconds=1)),
    ]
    (lane,) = lanes_of({"State": spans, "Incidents": []}, ago(300), NOW)
    shown = [(bar.span.label, round(bar.x), round(bar.width), bar.shown_from, bar.age) for bar in lane.bars]
    assert shown == [
        ("ready", 0, 333, ago(300), "3 min"),
        ("blink", 333, 2, ago(200), "0 s"),
        ("lost", 667, 333, ago(100), "100 s"),
    ]


def seen(*windows: tuple[float, float, float] | None) -> list[Seen | None]:
    return [Seen(*one) if one else None for one in windows]


def test_load_is_in_levels_of_its_peak_and_a_window_without_reports_is_a_gap() -> None:
    windows = seen((2, 0, 0), (2, 3, 0), (2, 4, 0), None, (2, 10, 0), (2, 9, 2.5))
    spans = load_spans(windows, ago(60), timedelta(seconds=10))
    shown = [(one.label, one.tone, one.start, one.end, one.reason) for one in spans]
    assert shown == [
        ("no load", Tone.IDLE, ago(60), ago(50), "up to 0.0 requests in flight, 0.0 waiting"),
        ("low", Tone.OK, ago(50), ago(30), "up to 4.0 requests in flight, 0.0 waiting"),
        ("high", Tone.MOVING, ago(20), ago(10), "up to 10.0 requests in flight, 0.0 waiting"),
        ("requests wait", Tone.WARN, ago(10), NOW, "up to 9.0 requests in flight, 2.5 waiting"),
    ]
    assert load_spans([], NOW, timedelta(seconds=10)) == []


def test_the_number_of_serving_cells_is_a_bar_until_it_changes() -> None:
    spans = cell_spans(seen((2, 1, 0), (2.02, 1, 0), (1.4, 1, 0), (0, 0, 0)), ago(40), timedelta(seconds=10))
    assert [(one.label, one.tone) for one in spans] == [
        ("2 serving", Tone.OK),
        ("changes", Tone.MOVING),
        ("none serving", Tone.BAD),
    ]
    assert (spans[0].start, spans[0].end) == (ago(40), ago(20))


def test_nothing_is_no_lane() -> None:
    assert lanes_of({"State": []}, ago(300), NOW) == ()
