"""Faults put into real processes over their administration ports."""

import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.asking import CLIENT
from tests.engine_agent.engines.sim.cells import CHAT, Member, running_cell, until

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Member]]:
    with running_cell(tmp_path_factory.mktemp("cell"), 1) as members:
        yield members


@pytest.fixture(params=[0, 1], ids=["leader", "follower"])
def member(cell: list[Member], request: pytest.FixtureRequest) -> Iterator[Member]:
    faulty: Member = cell[request.param]
    yield faulty
    faulty.lift_faults()


def chat(cell: list[Member], tokens: int = 5, timeout_s: float = 10.0) -> httpx.Response:
    return cell[0].chat({**CHAT, "max_tokens": tokens}, timeout_s)


def answer_text(answer: httpx.Response) -> str:
    return str(answer.raise_for_status().json()["choices"][0]["message"]["content"])


def test_a_hang_of_any_member_stops_the_cell_while_health_stays_good(cell: list[Member], member: Member) -> None:
    member.inject(kind="hang")

    def hangs() -> bool:
        try:
            chat(cell, tokens=1, timeout_s=0.3)
        except httpx.ReadTimeout:
            return True
        return False

    until(hangs, cell[0].output)
    assert [one.health()[0] for one in cell] == [200, 200]
    member.lift_faults()
    assert answer_text(chat(cell))


def test_a_slow_member_makes_the_cell_slow(cell: list[Member], member: Member) -> None:
    member.inject(kind="slow", factor=50)

    def slow() -> bool:
        before = cell[0].metric("vllm:inter_token_latency_seconds_sum")
        chat(cell, tokens=3)
        return cell[0].metric("vllm:inter_token_latency_seconds_sum") - before >= 2 * 50 * 0.002

    until(slow, cell[0].output)


def test_a_member_with_damaged_weights_makes_the_answers_wrong(cell: list[Member], member: Member) -> None:
    right = answer_text(chat(cell))

    member.inject(kind="wrong_answer")
    until(lambda: answer_text(chat(cell)) != right, cell[0].output)

    member.lift_faults()
    until(lambda: answer_text(chat(cell)) == right, cell[0].output)


def test_an_unready_member_says_so(cell: list[Member], member: Member) -> None:
    member.inject(kind="unready")

    assert member.health() == (503, "injected fault: unready")
    member.lift_faults()
    assert member.health() == (200, "")


def test_the_leader_answers_a_share_of_the_requests_with_500(cell: list[Member]) -> None:
    cell[0].inject(kind="error", ratio=0.5)
    statuses = [chat(cell, tokens=1).status_code for _ in range(40)]
    cell[0].lift_faults()

    assert set(statuses) == {200, 500}
    assert chat(cell, tokens=1).status_code == 200


def test_a_follower_refuses_faults_of_requests(cell: list[Member]) -> None:
    answer = CLIENT.post(f"{cell[1].admin_url}/fault", json={"kind": "error"})

    assert (answer.status_code, answer.json()["error"].partition(":")[0]) == (400, "kind")


def test_a_bad_fault_is_refused_by_the_name_of_its_field(cell: list[Member]) -> None:
    answer = CLIENT.post(f"{cell[0].admin_url}/fault", json={"kind": "slow", "factor": 0})

    assert answer.status_code == 400
    assert "factor" in answer.json()["error"]


def test_the_faults_in_force_can_be_read(cell: list[Member], member: Member) -> None:
    member.inject(kind="slow", factor=2)
    assert CLIENT.get(f"{member.admin_url}/fault").json() == {"faults": [{"kind": "slow", "factor": 2.0}]}

    member.lift_faults()
    assert CLIENT.get(f"{member.admin_url}/fault").json() == {"faults": []}


def test_a_crash_is_a_sudden_death(tmp_path: Path) -> None:
    with running_cell(tmp_path, 0) as (alone,):
        alone.inject(kind="crash")

        assert alone.exit_status() == -signal.SIGKILL


def computed(member: Member) -> tuple[int, float]:
    """Decode steps, and the ms that the member itself computed for them, since its engine started."""
    times = CLIENT.get(f"{member.admin_url}/steps").raise_for_status().json()
    return sum(times["steps"].values()), sum(times["compute_ms"].values())


def test_only_the_slow_member_says_that_it_computes_slowly(cell: list[Member], member: Member) -> None:
    before = [computed(one) for one in cell]
    member.inject(kind="slow", factor=50)
    chat(cell, tokens=5)
    until(lambda: all(computed(one)[0] > steps for one, (steps, _) in zip(cell, before, strict=True)), cell[0].output)
    step_ms = {}
    for one, (steps, compute_ms) in zip(cell, before, strict=True):
        now = computed(one)
        step_ms[one is member] = (now[1] - compute_ms) / (now[0] - steps)
    assert step_ms[True] > 20 * step_ms[False]
