"""Orders to providers: carried out once although processes crash, delayed by no slow provider; outdated statuses do not
count."""

import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta

import pytest
from django.db import connection

from fleet.clouds.base import AttemptEnded, Later, LaunchSpec, Machine, NoCapacity, NoQuota, ProviderError, Unknown
from fleet.faults.planning.liveness import nodes_in_doubt
from fleet.machines.models import MachineStatus, ProviderCall
from fleet.machines.services import provisioning
from fleet.machines.services.orders import CLAIM, calls_claim, claims_renew, machines_described
from fleet.machines.services.provisioning import CALL_LIMIT_S, CALLS_AT_ONCE, Provisioning, call_carry_out
from fleet.nodes.models import AgentListener, Node, NodeReport
from fleet.nodes.selectors import unheard_machines
from fleet.nodes.services.nodes import agent_restart, node_retire, nodes_launch
from fleet.reconcile.planning.decisions import LaunchNodes, RestartAgent, RetireNode
from fleet.reconcile.planning.settings import FleetSettings
from fleet.reconcile.planning.snapshot import ProviderStatus
from fleet.reconcile.planning.states import NodeState, ProviderAction
from fleet.reconcile.selectors.snapshot import fleet_view
from kernel import clock
from kernel.models import Event
from kernel.transitions import StaleDecision
from tests.fleet import rows
from tests.fleet.cloud import Cloud
from tests.fleet.provision import MANY, Clock, provision
from tests.fleet.rows import KIND, NOW

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("now", "cloud")]

DEADLINE_S = 60.0


class Killed(BaseException):
    pass


def order(count: int = 1) -> None:
    rows.deployment()
    there = Node.objects.exclude(state=NodeState.RETIRED).count()
    nodes_launch(LaunchNodes("us-east-1", KIND, count, "needed", there=there), now=clock.now())


def claimed() -> list[ProviderCall]:
    return [call for calls in calls_claim(free={}, otherwise=MANY, now=clock.now()) for call in calls]


@pytest.mark.django_db
def test_a_launch_whose_process_dies_before_the_call_is_made_by_the_next(cloud: Cloud, now: Clock) -> None:
    order()
    claimed()
    provision()
    assert not cloud.launched, "it is another's for as long as the claim lasts"
    now.now += CLAIM
    provision()
    assert [spec.id for spec in cloud.launched] == [Node.objects.get().id]
    assert not ProviderCall.objects.exists()


@pytest.mark.django_db
def test_a_launch_whose_process_dies_after_the_call_is_repeated_for_the_same_node(
    cloud: Cloud, now: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    order()

    def dies(**_: object) -> None:
        raise Killed

    with monkeypatch.context() as broken:
        broken.setattr(provisioning, "machine_store", dies)
        with pytest.raises(Killed):
            provision()
    now.now += CLAIM
    provision()
    node = Node.objects.get()
    assert [spec.id for spec in cloud.launched] == [node.id, node.id]
    assert (node.state, node.port_base is None, node.state_since) == ("joining", False, now.now)


@pytest.mark.django_db
def test_launches_that_end_without_a_word_again_and_again_have_failed(cloud: Cloud, now: Clock) -> None:
    order()
    for _ in range(provisioning.LAUNCH_ATTEMPTS):
        claimed()
        now.now += CLAIM
    provision()
    assert not cloud.launched
    node = Node.objects.get()
    assert (node.state, node.reason) == ("lost", "its launch failed: 3 attempts ended without an answer")


WAITS = [
    NoCapacity("no trn1.32xlarge in use1-az4"),
    NoQuota("64 vCPUs of P", "L-417A185B"),
    Later("too many calls", 5.0),
    Unknown("no answer within 20 s"),
]


@pytest.mark.django_db
@pytest.mark.parametrize("answer", WAITS, ids=lambda answer: type(answer).__name__)
def test_a_machine_that_cannot_be_had_yet_is_waited_for_however_often_it_is_asked_for(
    cloud: Cloud, now: Clock, answer: ProviderError
) -> None:
    order()
    cloud.answer = answer
    for _ in range(2 * provisioning.LAUNCH_ATTEMPTS):
        provision()
        now.now = ProviderCall.objects.get().due_at
    node = Node.objects.get()
    assert node.state == NodeState.JOINING
    assert node.reason.startswith(f"it waits for its machine: {answer}; next try at ")
    assert Event.objects.filter(kind="node.waiting").count() == 1, "said once, not with every try"
    assert [view.ordered for view in fleet_view(now=now.now).nodes.values()] == [ProviderAction.LAUNCH], "it is coming"
    cloud.answer = None
    provision()
    node.refresh_from_db()
    assert ([spec.id for spec in cloud.launched], node.reason, node.state_since) == ([node.id], "needed", now.now)
    assert not ProviderCall.objects.exists()


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("age_s", "stated_s", "pause_s"),
    [(0, None, 2), (9, None, 9), (3600, None, 60), (0, 5, 5), (9, 5, 9), (0, 1e12, 3600), (0, -1.0, 2)],
)
def test_a_pause_is_as_long_as_the_order_is_old_and_not_shorter_than_the_provider_wants(
    cloud: Cloud, now: Clock, age_s: float, stated_s: float | None, pause_s: float
) -> None:
    order()
    now.now += timedelta(seconds=age_s)
    cloud.answer = Later("too many calls", stated_s)
    provision()
    assert ProviderCall.objects.get().due_at - now.now == timedelta(seconds=pause_s)


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (ProviderError("no such image"), "its launch failed: no such image"),
        (AttemptEnded("i-0abc was terminated"), "its machine has ended: i-0abc was terminated"),
    ],
)
def test_a_launch_that_would_be_refused_again_makes_a_lost_node(
    cloud: Cloud, answer: ProviderError, reason: str
) -> None:
    order()
    cloud.answer = answer
    provision()
    node = Node.objects.get()
    assert (node.state, node.reason, ProviderCall.objects.count()) == ("lost", reason, 0)


@pytest.mark.django_db
def test_a_waiting_node_that_is_given_back_is_not_launched_again(cloud: Cloud, now: Clock) -> None:
    order()
    (call,) = claimed()
    node_retire(RetireNode(call.node_id, NodeState.JOINING, "surplus"), now=NOW)
    cloud.answer = NoCapacity("sold out")
    call_carry_out([call])
    assert (Node.objects.get().reason, ProviderCall.objects.get().due_at) == ("surplus", NOW)
    cloud.answer = None
    provision()
    assert (cloud.launched, cloud.terminated) == ([], [call.node_id])


@pytest.mark.django_db
def test_an_end_that_is_not_known_is_tried_again_and_an_agent_found_dead_again(cloud: Cloud, now: Clock) -> None:
    rows.node("n-lost", state=NodeState.LOST)
    node_retire(RetireNode("n-lost", NodeState.LOST, "lost"), now=NOW)
    rows.node("n-a")
    agent_restart(RestartAgent("n-a", "dead"), now=NOW)
    cloud.answer = Unknown("no answer")
    provision()
    assert [(call.node_id, call.action) for call in ProviderCall.objects.all()] == [("n-lost", "terminate")]


@pytest.mark.django_db
def test_a_call_that_runs_long_is_nobody_elses(now: Clock) -> None:
    order()
    (call,) = claimed()
    for _ in range(5):
        now.now += CLAIM / 2
        claims_renew([call.claim], now=now.now)
        assert not claimed()


@pytest.mark.django_db
def test_a_node_is_no_longer_awaited_from_when_it_was_ordered_but_from_its_launch(cloud: Cloud, now: Clock) -> None:
    rows.node("n-a")
    order()
    now.now += timedelta(hours=1)
    cloud.status = ProviderStatus.GONE
    provision()
    view = fleet_view(now=now.now)
    (node,) = (node for node in view.nodes.values() if node.id != "n-a")
    assert (node.ordered, node.state_since) == (None, now.now)


@pytest.mark.django_db
def test_a_machine_given_back_during_its_launch_is_ended_after_it(cloud: Cloud) -> None:
    order()
    (call,) = claimed()
    node_retire(RetireNode(call.node_id, NodeState.JOINING, "surplus"), now=NOW)
    assert not claimed(), "the launch is not over"
    call_carry_out([call])
    assert cloud.terminated == []
    provision()
    assert cloud.terminated == [call.node_id]
    assert not ProviderCall.objects.exists()


@pytest.mark.django_db
def test_a_machine_that_a_forgotten_launch_boots_in_the_end_is_ended_again(cloud: Cloud, now: Clock) -> None:
    order()
    (call,) = claimed()
    now.now += CLAIM
    node_retire(RetireNode(call.node_id, NodeState.JOINING, "surplus"), now=now.now)
    provision()
    assert (cloud.terminated, Node.objects.get().terminated_at) == ([call.node_id], now.now)
    call_carry_out([call])
    provision()
    assert cloud.terminated == [call.node_id] * 2


@pytest.mark.django_db
def test_what_heals_is_done_before_what_tidies_up() -> None:
    rows.node("n-lost", state=NodeState.LOST)
    node_retire(RetireNode("n-lost", NodeState.LOST, "lost"), now=NOW - timedelta(hours=1))
    rows.node("n-a")
    agent_restart(RestartAgent("n-a", "dead"), now=NOW)
    order(2)
    busy = {"local": 2}
    assert [call.action for (call,) in calls_claim(free=busy, otherwise=8, now=NOW)] == ["launch", "launch"]
    assert calls_claim(free={"local": 0}, otherwise=8, now=NOW) == []
    assert [call.action for call in claimed()] == ["restart_agent", "terminate"]


@pytest.mark.django_db
def test_an_agent_is_started_again_once(cloud: Cloud, now: Clock) -> None:
    rows.node("n-a", connected=False)
    cloud.status = ProviderStatus.AGENT_DEAD
    provision()
    assert fleet_view(now=NOW).nodes["n-a"].provider is ProviderStatus.AGENT_DEAD
    agent_restart(RestartAgent("n-a", "dead"), now=NOW)
    with pytest.raises(StaleDecision):
        agent_restart(RestartAgent("n-a", "dead"), now=NOW)
    assert fleet_view(now=NOW).nodes["n-a"].ordered is ProviderAction.RESTART_AGENT
    now.now += timedelta(seconds=1)
    provision()
    machines_described({"n-a": ProviderStatus.AGENT_DEAD}, asked_at=NOW)
    assert cloud.restarted == ["n-a"]
    view = fleet_view(now=now.now).nodes["n-a"]
    assert (view.provider, view.ordered) == (ProviderStatus.UNKNOWN, None), "an answer from before counts no more"


@pytest.mark.django_db
def test_providers_are_asked_about_the_nodes_that_planners_doubt(now: Clock) -> None:
    rows.node("n-well")
    rows.node("n-silent", created_at=NOW - timedelta(hours=1), report={"last_seen_at": NOW - timedelta(seconds=4)})
    rows.node("n-cut", connected=False)
    rows.node("n-joining", state=NodeState.JOINING, connected=False)
    rows.node("n-lost", state=NodeState.LOST, connected=False)
    order()
    settings = FleetSettings()
    doubted = nodes_in_doubt(fleet_view(now=NOW), settings, NOW)
    assert (
        sorted(doubted)
        == unheard_machines(now=NOW, settings=settings).in_doubt["local"]
        == ["n-cut", "n-joining", "n-silent"]
    )


@pytest.mark.django_db
def test_a_pass_is_due_when_a_web_process_may_have_ended(now: Clock) -> None:
    AgentListener.objects.create(id="web-1", since=NOW, until=NOW + timedelta(seconds=4))
    rows.node("n-well", report={"listener": "web-1"})
    rests: list[float] = []
    loop = Provisioning()
    loop.run_pass(rest=rests.append)
    assert rests == [4.0]
    NodeReport.objects.update(quiet=True)
    loop.run_pass(rest=rests.append)
    NodeReport.objects.update(quiet=False)
    order()
    ProviderCall.objects.update(due_at=NOW + timedelta(seconds=10))
    loop.run_pass(rest=rests.append)
    assert rests == [4.0], "a silent node may soon be in doubt, and an order is to be carried out"


class SlowCloud(Cloud):
    """Launches nothing until released."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Semaphore(0)
        self.go_on = threading.Event()

    def launch(self, specs: Sequence[LaunchSpec]) -> tuple[Machine, ...]:
        self.begun.release()
        assert self.go_on.wait(DEADLINE_S)
        return super().launch(specs)

    def describe(self, node_ids: Sequence[str]) -> dict[str, ProviderStatus]:
        return {}


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch, cloud: Cloud) -> Iterator[SlowCloud]:
    made = SlowCloud()
    monkeypatch.setattr(provisioning, "provider_named", lambda name: made if name == "slow" else cloud)
    yield made
    made.go_on.set()
    for thread in threading.enumerate():
        if thread.name.startswith("provider "):
            thread.join(DEADLINE_S)


@pytest.mark.django_db(transaction=True)
def test_a_provider_that_hangs_stops_no_other_and_is_said(slow: SlowCloud, cloud: Cloud) -> None:
    rows.region("us-east-1", provider="slow")
    order(CALLS_AT_ONCE + 1)
    rows.node("n-lost", where="us-west-2", state=NodeState.LOST)
    node_retire(RetireNode("n-lost", NodeState.LOST, "lost"), now=NOW)
    time_s = 0.0
    own = Provisioning(now_s=lambda: time_s)
    assert own.run_pass()
    for _ in range(CALLS_AT_ONCE):
        assert slow.begun.acquire(timeout=DEADLINE_S)
    for thread in threading.enumerate():
        if thread.name == "provider local":
            thread.join(DEADLINE_S)
    assert cloud.terminated == ["n-lost"]
    assert own.run_pass()
    assert ProviderCall.objects.filter(claim="").count() == 1, "it gets no more than it may have at once"
    time_s = CALL_LIMIT_S + 1
    assert not own.run_pass()
    slow.go_on.set()
    for thread in threading.enumerate():
        if thread.name == "provider slow":
            thread.join(DEADLINE_S)
    assert own.run_pass()
    assert len(slow.launched) >= CALLS_AT_ONCE
    assert not MachineStatus.objects.exclude(status=ProviderStatus.UNKNOWN).exists()
    connection.close()
