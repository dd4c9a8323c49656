"""Time lines: spans between changes, cut at the ends of the shown time."""

from datetime import timedelta

from fleet.recorder.planning.time_line import Change, Span, lanes_of, states_of
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


def test_nothing_is_no_lane() -> None:
    assert lanes_of({"State": []}, ago(300), NOW) == ()
