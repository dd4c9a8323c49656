"""What a member computed itself: its own slowness, and not that of its mates."""

from engine_agent.engines.step_meter import StepMeter
from engine_agent.protocol.messages import StepTimes


def test_steps_are_summed_by_batch_size() -> None:
    meter = StepMeter()
    for sequences, compute_ms in ((1, 20.0), (3, 21.0), (4, 22.5)):
        meter.note(sequences, compute_ms)
    assert meter.times() == StepTimes(steps={0: 1, 2: 2}, compute_ms={0: 20.0, 2: 43.5})


def test_a_slow_follower_takes_longer_for_what_was_computed_while_it_was_slow() -> None:
    cell, follower = StepMeter(), StepMeter()
    cell.note(1, 20.0)
    follower.follow(cell.times(), slow_factor=1.0)
    cell.note(1, 20.0)
    follower.follow(cell.times(), slow_factor=3.0)
    assert follower.times() == StepTimes(steps={0: 2}, compute_ms={0: 80.0})


def test_a_beat_that_is_lost_or_repeated_loses_and_adds_nothing() -> None:
    cell, follower = StepMeter(), StepMeter()
    for _ in range(3):
        cell.note(2, 10.0)
    for _ in range(2):
        follower.follow(cell.times(), slow_factor=1.0)
    assert follower.times() == cell.times()
