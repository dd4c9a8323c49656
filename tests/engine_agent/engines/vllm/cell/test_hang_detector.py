"""A hung member is named after `hang_s`, and no member before."""

from engine_agent.engines.vllm.cell.leader_link import HangDetector

HANG_S = 5.0
TICK_S = 0.25


class World:
    """A detector for two members on ticks; members that are not stopped send a heartbeat at every tick."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.detector = HangDetector(HANG_S, {0: "rank 0", 1: "rank 1"}, self.now_s)
        self.done = {0: 0, 1: 0}
        self.stopped: set[int] = set()

    def tick(self, seconds: float) -> str:
        """Returns the first reason within that time."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s += TICK_S
            for rank in self.done.keys() - self.stopped:
                self.detector.note_beat(rank, self.done[rank], self.now_s)
            if reason := self.detector.hang_reason(self.now_s):
                return reason
        return ""

    def step(self, number: int) -> None:
        self.detector.step_called(number, self.now_s)


def test_idle_members_that_beat_are_well() -> None:
    assert World().tick(3600) == ""


def test_a_silent_member_is_named_after_hang_s() -> None:
    world = World()
    world.tick(10)
    world.stopped.add(1)
    assert world.tick(HANG_S - TICK_S) == ""
    assert world.tick(2 * TICK_S) == "rank 1 hangs: no heartbeat for 5 s"


def test_a_step_that_one_does_not_finish_names_it() -> None:
    world = World()
    world.step(1)
    world.done[0] = 1
    assert world.tick(HANG_S - TICK_S) == ""
    assert world.tick(2 * TICK_S) == "rank 1 did not finish step 1 within 5 s"


def test_a_step_that_nobody_finishes_names_all() -> None:
    world = World()
    world.step(1)
    assert world.tick(2 * HANG_S) == "rank 0 and rank 1 did not finish step 1 within 5 s"


def test_steps_that_come_and_go_are_well_however_long_it_lasts() -> None:
    world = World()
    for number in range(1, 100):
        world.step(number)
        assert world.tick(HANG_S / 2) == ""
        world.done = dict.fromkeys(world.done, number)
    assert world.tick(60) == ""


def test_a_member_that_lags_behind_but_moves_is_well() -> None:
    world = World()
    for number in range(1, 20):
        world.step(number)
        world.done = {0: number, 1: number - 1}
        assert world.tick(HANG_S / 2) == ""


def test_a_stall_of_this_process_itself_accuses_nobody() -> None:
    world = World()
    world.step(1)
    world.tick(1)
    world.now_s += 3600
    assert world.detector.hang_reason(world.now_s) == ""
    world.done = {0: 1, 1: 1}
    assert world.tick(60) == ""
