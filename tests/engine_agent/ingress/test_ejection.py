"""A cell that fails at once attracts everything; it is taken away within a bounded number of requests."""

from dataclasses import replace

import pytest

from engine_agent.ingress.ejection import Ejections, EjectionSettings
from engine_agent.ingress.running import RunningServer
from tests.engine_agent.fake_control_plane import eventually
from tests.engine_agent.ingress.cells import FakeCell
from tests.engine_agent.ingress.ingresses import RunningIngress, pool

pytestmark = pytest.mark.processes

LIMITS = EjectionSettings(failures=5, first_s=10.0, longest_s=40.0)
SERVER = RunningServer("pool.a", "c-0", "127.0.0.1", 1, 100, 8, draining=False, maintenance=False, usable=True)
BODY = b'{"model": "demo"}'


class Pool:
    """The counters of a pool's cells as looks see them."""

    def __init__(self, cells: int) -> None:
        self.servers = [replace(SERVER, name=f"c-{at}") for at in range(cells)]
        self.ejections = Ejections(LIMITS)

    def sample(self, now_s: float, *answers: tuple[int, int]) -> set[str]:
        """(good, bad) answers of each cell since the last look; the names of the cells that are away."""
        for at, (good, bad) in enumerate(answers):
            server = self.servers[at]
            self.servers[at] = replace(
                server,
                responses_total=server.responses_total + good + bad,
                failures_total=server.failures_total + bad,
            )
        return {name for _, name in self.ejections.note(self.servers, now_s)}


def test_a_cell_that_fails_while_others_do_well_is_away_for_longer_each_time() -> None:
    seen = Pool(3)
    assert seen.sample(0.0, (1, 4), (5, 0), (5, 0)) == set()
    assert seen.sample(0.3, (0, 1), (5, 0), (5, 0)) == {"c-0"}
    assert seen.sample(10.2, (0, 0), (5, 0), (5, 0)) == {"c-0"}
    assert seen.sample(10.4, (0, 0), (5, 0), (5, 0)) == set()
    assert seen.sample(10.7, (0, 9), (5, 0), (5, 0)) == {"c-0"}
    assert seen.sample(30.5, (0, 0), (5, 0), (5, 0)) == {"c-0"}, "20 s the second time"
    assert seen.sample(30.8, (9, 1), (5, 0), (5, 0)) == set()


def test_what_fails_everywhere_is_the_requests_and_nobody_goes() -> None:
    assert Pool(3).sample(0.0, (0, 50), (0, 50), (0, 50)) == set()


def test_a_pool_keeps_at_least_half_of_its_cells() -> None:
    assert Pool(1).sample(0.0, (0, 50)) == set()
    assert len(Pool(2).sample(0.0, (0, 50), (9, 0))) == 1
    assert len(Pool(5).sample(0.0, (0, 9), (0, 9), (0, 9), (0, 9), (9, 0))) == 2


def test_a_cell_that_haproxy_has_marked_down_for_its_failures_is_ejected_too() -> None:
    seen = Pool(2)
    seen.servers[0] = replace(seen.servers[0], usable=False)
    assert seen.sample(0.0, (0, 5), (9, 0)) == {"c-0"}


def test_failures_are_forgotten_with_a_success_and_with_a_new_worker() -> None:
    seen = Pool(2)
    assert seen.sample(0.0, (0, 4), (9, 0)) == set()
    assert seen.sample(0.3, (9, 4), (9, 0)) == set()
    assert seen.sample(0.6, (0, 4), (9, 0)) == set()
    seen.servers = [replace(server, responses_total=0, failures_total=0) for server in seen.servers]
    assert seen.sample(0.9, (0, 0), (1, 0)) == set()


def is_ejected(ingress: RunningIngress, cell: FakeCell) -> bool:
    """Reported, and in force."""
    running = ingress.ingress.serving.running
    drained = {server.name for server in running.servers if server.draining} if running else set()
    return ingress.reports[-1].cells[cell.name].ejected and f"{cell.name}-g1" in drained


@pytest.mark.asyncio
async def test_a_black_hole_is_ejected_within_a_bounded_number_of_requests(ingress: RunningIngress) -> None:
    async with FakeCell(step_s=0.02).running() as good, FakeCell().running() as other, FakeCell().running() as hole:
        hole.fails = True
        await ingress.route(pool(good, other, hole))
        await ingress.sees(**{good.name: "up", other.name: "up", hole.name: "up"})
        statuses = []
        while not is_ejected(ingress, hole):
            statuses.append((await ingress.post(BODY)).status_code)
            assert len(statuses) < 2000
        assert statuses.count(500) <= 40, "5 for each of a few health checks, before the next look"
        await ingress.sees(**{hole.name: "down"})
        failed = len(hole.requests)
        assert {(await ingress.post(BODY)).status_code for _ in range(20)} == {200}
        assert len(hole.requests) == failed


@pytest.mark.asyncio
async def test_requests_that_fail_everywhere_do_not_close_the_pool(ingress: RunningIngress) -> None:
    async with FakeCell().running() as one, FakeCell().running() as two:
        one.fails = two.fails = True
        await ingress.route(pool(one, two))
        await ingress.sees(**{one.name: "up", two.name: "up"})
        for _ in range(30):
            await ingress.post(BODY)
        one.fails = two.fails = False

        async def serves() -> bool:
            return (await ingress.post(BODY)).status_code == 200

        while not await serves():
            pass
        await eventually(lambda: set(ingress.cells.values()) == {"up"})
        assert not any(cell.ejected for cell in ingress.reports[-1].cells.values())
