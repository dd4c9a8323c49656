"""A HAProxy that exits once is restarted immediately, one that keeps exiting more and more slowly, and a silent one is
killed, but only after unanswered commands."""

from typing import cast

import pytest

from engine_agent.ingress import supervisor
from engine_agent.ingress.command_socket import COMMAND_TIMEOUT_S, Unreachable
from engine_agent.ingress.desired import EMPTY_DESIRED, DesiredHaproxy
from engine_agent.ingress.haproxy import HaproxyProcess
from engine_agent.ingress.running import RunningHaproxy, RunningServer
from engine_agent.ingress.settings import Times
from engine_agent.ingress.supervisor import STABLE_AFTER_S, HaproxySupervisor, RestartBackoff

pytestmark = pytest.mark.processes


def test_one_that_never_ran_may_start_and_is_no_news() -> None:
    restarts = RestartBackoff()
    assert not restarts.note_exit(0.0, 0.5)
    assert restarts.may_start(0.0)


def test_a_steady_one_is_started_again_at_once_however_often() -> None:
    restarts = RestartBackoff()
    for now_s in (10.0, 20.0, 30.0):
        restarts.note_start(now_s)
        assert restarts.note_exit(now_s + STABLE_AFTER_S, 1.0)
        assert restarts.may_start(now_s + STABLE_AFTER_S)


def test_one_that_dies_young_waits_longer_each_time_up_to_a_limit() -> None:
    restarts = RestartBackoff()
    waits = []
    for _ in range(8):
        restarts.note_start(100.0)
        restarts.note_exit(100.1, 1.0)
        waits.append(round(restarts.due_at_s - 100.1, 2))
    assert waits == [0.0, 1.0, 2.0, 4.0, 5.0, 5.0, 5.0, 5.0]
    assert not restarts.may_start(102.0)


class Hanging(Exception): ...


class StandInProcess:
    """A HAProxy that runs until it is killed."""

    pid = 4711
    admin = None

    def is_alive(self) -> bool:
        return True

    async def reload(self, desired: DesiredHaproxy) -> None:
        pass

    async def kill(self) -> None:
        raise Hanging

    def adopt(self) -> bool:
        return True


@pytest.fixture
def supervised(monkeypatch: pytest.MonkeyPatch) -> "Supervised":
    return Supervised(monkeypatch)


class Supervised:
    """A supervisor on virtual time, and whether its HAProxy answers."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, read_every_s: float = 0.0, read_idle_every_s: float = 0.0
    ) -> None:
        self.now_s = 1000.0
        self.in_flight = self.requests_total = 0
        self.answers = True
        self.questions = 0
        self.desired: DesiredHaproxy | None = None
        monkeypatch.setattr(supervisor, "_now_s", lambda: self.now_s)
        monkeypatch.setattr(supervisor, "read_worker", self._read_worker)
        process = cast(HaproxyProcess, StandInProcess())
        self.haproxy = HaproxySupervisor(
            "HAProxy",
            process,
            Times(),
            lambda desired: "",
            read_every_s=read_every_s,
            read_idle_every_s=read_idle_every_s,
        )
        self.haproxy.adopt()

    async def _read_worker(self, *_: object) -> RunningHaproxy:
        self.questions += 1
        if not self.answers:
            self.now_s += COMMAND_TIMEOUT_S
            raise Unreachable("it does not respond")
        cell = RunningServer(
            "pool.a", "c-1", "::1", 1, 1, 8, False, False, True, self.in_flight, 0, self.requests_total
        )  # fmt: skip
        servers = () if self.desired else (cell,)
        return RunningHaproxy("", 1, servers, (), {})

    async def asked_in(self, seconds: float) -> int:
        asked = self.questions
        await self.look_until(self.now_s + seconds)
        return self.questions - asked

    async def look(self, *, after_s: float = 0.25) -> None:
        self.now_s += after_s
        await self.haproxy.reconcile(self.desired, EMPTY_DESIRED)

    async def look_until(self, end_s: float) -> None:
        while self.now_s < end_s:
            await self.look()


@pytest.mark.asyncio
@pytest.mark.parametrize("stopped_s", [5.0, 15.0, 60.0, 3600.0])
async def test_an_agent_that_was_stopped_asks_before_it_judges(supervised: Supervised, stopped_s: float) -> None:
    await supervised.look()
    for _ in range(3):
        await supervised.look(after_s=stopped_s)
        assert supervised.haproxy.problem == ""


@pytest.mark.asyncio
async def test_one_that_does_not_answer_is_killed_after_its_patience(supervised: Supervised) -> None:
    await supervised.look()
    supervised.answers = False
    began_s = supervised.now_s
    with pytest.raises(Hanging):
        await supervised.look_until(began_s + 60.0)
    assert supervised.haproxy.problem.startswith("HAProxy: no response to 5 commands in 1")
    assert supervised.now_s - began_s < Times().silent_after_s + 2 * (COMMAND_TIMEOUT_S + 0.25)


@pytest.mark.asyncio
async def test_one_that_is_as_desired_is_asked_seldom_and_a_change_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seldom = Supervised(monkeypatch, read_every_s=1.0)
    await seldom.look_until(seldom.now_s + 10.0)
    assert seldom.questions == 10
    await seldom.look()
    asked = seldom.questions
    seldom.desired = EMPTY_DESIRED
    await seldom.look()
    assert seldom.questions == asked + 1


@pytest.mark.asyncio
async def test_one_that_has_nothing_to_do_is_asked_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    idle = Supervised(monkeypatch, read_idle_every_s=1.0)
    await idle.look_until(idle.now_s + 2.0)
    assert await idle.asked_in(10.0) == 10
    idle.requests_total += 1
    await idle.look_until(idle.now_s + 1.0)  # it is seen
    idle.in_flight = 1
    await idle.look_until(idle.now_s + 1.0)
    assert await idle.asked_in(10.0) == 40
    idle.in_flight = 0
    await idle.look_until(idle.now_s + 2.0)
    assert await idle.asked_in(10.0) == 10


@pytest.mark.asyncio
async def test_after_a_reload_it_is_asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    idle = Supervised(monkeypatch, read_idle_every_s=1.0)
    await idle.look_until(idle.now_s + 4.0)
    asked = idle.questions
    await idle.haproxy.reload(EMPTY_DESIRED)
    await idle.look()
    assert idle.questions == asked + 1


@pytest.mark.asyncio
@pytest.mark.parametrize("pauses", [{"read_every_s": 1.0}, {"read_idle_every_s": 1.0}])
async def test_one_that_is_asked_seldom_and_does_not_answer_is_killed_as_soon(
    monkeypatch: pytest.MonkeyPatch, pauses: dict[str, float]
) -> None:
    seldom = Supervised(monkeypatch, **pauses)
    await seldom.look_until(seldom.now_s + 2.0)
    seldom.answers = False
    began_s = seldom.now_s
    with pytest.raises(Hanging):
        await seldom.look_until(began_s + 60.0)
    assert seldom.now_s - began_s < Times().silent_after_s + 2 * (COMMAND_TIMEOUT_S + 0.25)
