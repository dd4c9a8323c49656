"""Carries out orders to providers, and queries them about machines in doubt: the loop `fleet.provision`. Each call has
its own thread, so that a slow provider delays neither a pass nor another provider. A hanging call keeps its slot, is
retried by another attempt, and is logged; meanwhile passes do not count as complete."""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from time import monotonic

from django.db import connection, transaction

from engine_agent.protocol.states import AgentKind
from fleet.agents.services.authority import authority_ensure
from fleet.agents.services.enrolment import join_token_issue
from fleet.clouds.base import AttemptEnded, LaunchSpec, Machine, ProviderError, provider_named
from fleet.clouds.services.garbage import provider_garbage_collect
from fleet.faults.services.incidents import repair_record
from fleet.faults.services.repairs import repair_refused
from fleet.machines.models import MachineStatus, ProviderCall
from fleet.machines.services.machines import machine_ended, machine_launched
from fleet.machines.services.orders import (
    call_end,
    call_retry,
    calls_claim,
    claims_renew,
    machines_described,
    machines_forget,
    provider_order,
)
from fleet.nodes.models import Node
from fleet.nodes.selectors import first_listener_ends, unheard_machines
from fleet.nodes.services.events import node_event
from fleet.nodes.services.nodes import launch_failed, launch_waits, machine_store
from fleet.reconcile.planning.rest import REST_S
from fleet.reconcile.planning.settings import FleetSettings
from fleet.reconcile.planning.states import NodeState, ProviderAction
from fleet.regions.models import Region
from fleet.releases.services.releases import launch_release
from kernel import clock, wake_ups
from kernel.refusals import Conflict
from kernel.tones import Tone

JOIN_TOKEN_TTL = timedelta(minutes=15)
CALLS_AT_ONCE = 8
"""Of one provider in one process: launches for a whole region take seconds, not minutes."""
CALL_LIMIT_S = 60.0
"""Then a call counts as hanging. Its claim is not renewed, so another attempt begins."""
GARBAGE_EVERY_S = 60.0
LAUNCH_ATTEMPTS = 3
"""Attempts without an answer, because they hung or their process died, before the launch fails. "Not now" and "unknown"
do not count: the node waits for its machine."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunningCall:
    """`claim` is empty for queries. `began_s` on the monotonic clock."""

    provider: str
    claim: str
    began_s: float


class Provisioning:
    """The calls of this process. One thread makes the passes."""

    def __init__(self, now_s: Callable[[], float] = monotonic) -> None:
        self._now_s = now_s
        self._running: dict[threading.Thread, RunningCall] = {}
        self._garbage_due_s = now_s() + GARBAGE_EVERY_S
        self._suspects: dict[str, Mapping[str, datetime]] = {}
        self._collecting: set[str] = set()

    def run_pass(self, rest: Callable[[float], None] = lambda _: None) -> bool:
        """Starts due calls and queries nodes in doubt. Returns False if a call hangs. `rest` is called with the seconds
        for which no pass is needed unless something changes."""
        self._running = {thread: call for thread, call in self._running.items() if thread.is_alive()}
        alive = [call for call in self._running.values() if not self._is_hanging(call)]
        claims_renew([call.claim for call in alive if call.claim], now=clock.now())
        is_any_unheard = self._ask_about_machines()
        self._collect_garbage()
        busy = Counter(call.provider for call in self._running.values())
        free = {provider: CALLS_AT_ONCE - count for provider, count in busy.items()}
        for calls in calls_claim(free=free, otherwise=CALLS_AT_ONCE, now=clock.now()):
            self._start_call(calls[0].node.region.provider, partial(call_carry_out, calls), calls[0].claim)
        hanging = Counter(call.provider for call in self._running.values() if self._is_hanging(call))
        for provider, count in hanging.items():
            log.error("%d calls to provider %s have not returned for %.0f s", count, provider, CALL_LIMIT_S)
        if not is_any_unheard and not self._running and not ProviderCall.objects.exists():
            rest(_rest_s(clock.now()))
        return not hanging

    def _collect_garbage(self) -> None:
        """Once a minute, each provider in its own thread. A provider whose thread still runs is skipped."""
        if self._now_s() < self._garbage_due_s:
            return
        self._garbage_due_s = self._now_s() + GARBAGE_EVERY_S
        for provider in Region.objects.order_by().values_list("provider", flat=True).distinct():
            if provider not in self._collecting:
                self._collecting.add(provider)
                collect = partial(self._collect_garbage_of, provider)
                # Separate from the calls, so that a slow list does not delay queries about machines in doubt.
                threading.Thread(target=_run_alone, args=(collect,), name=f"garbage {provider}", daemon=True).start()

    def _collect_garbage_of(self, provider: str) -> None:
        try:
            before = self._suspects.get(provider, {})
            self._suspects[provider] = provider_garbage_collect(provider, before, now=clock.now())
        finally:
            self._collecting.discard(provider)

    def _ask_about_machines(self) -> bool:
        """Returns whether time alone may put a node in doubt."""
        asked = {call.provider for call in self._running.values() if not call.claim}
        unheard = unheard_machines(now=clock.now(), settings=FleetSettings())
        for provider, nodes in unheard.in_doubt.items():
            if provider not in asked:
                self._start_call(provider, partial(machines_describe, provider, nodes))
        return unheard.is_any

    def _is_hanging(self, call: RunningCall) -> bool:
        return self._now_s() - call.began_s > CALL_LIMIT_S

    def _start_call(self, provider: str, work: Callable[[], None], claim: str = "") -> None:
        # A daemon: a hanging call must not delay the exit of the process.
        thread = threading.Thread(target=_run_alone, args=(work,), name=f"provider {provider}", daemon=True)
        self._running[thread] = RunningCall(provider, claim, self._now_s())
        thread.start()


def _rest_s(now: datetime) -> float:
    """Orders, silent nodes and ended connections wake this loop. The end of a web process does not, and puts all of its
    nodes in doubt."""
    ends = first_listener_ends(now)
    return REST_S if ends is None else min(REST_S, (ends - now).total_seconds())


def _run_alone(work: Callable[[], None]) -> None:
    try:
        work()
    except Exception:
        log.exception("the result of a provider's call could not be stored; the call is repeated")
    finally:
        connection.close()


def machines_describe(provider: str, nodes: list[str]) -> None:
    """Queries a provider about these nodes' machines and stores the answer."""
    asked_at = clock.now()
    try:
        statuses = provider_named(provider).describe(nodes)
    except ProviderError as error:
        log.warning("provider %s did not answer: %s", provider, error)
        return
    machines_described(statuses, asked_at=asked_at)


def call_carry_out(calls: Sequence[ProviderCall]) -> None:
    """Makes one claimed call and stores its result: the launches of a unit, or one order. After a crash in between the
    call is repeated, which is harmless."""
    try:
        if calls[0].action == ProviderAction.LAUNCH:
            _launch(calls)
        else:
            CARRY_OUT[ProviderAction(calls[0].action)](calls[0])
    except ProviderError as error:
        _note_failure(calls, error)


def _launch(calls: Sequence[ProviderCall]) -> None:
    if max(call.attempts for call in calls) > LAUNCH_ATTEMPTS:
        raise ProviderError(f"{LAUNCH_ATTEMPTS} attempts ended without an answer")
    bundle, release = authority_ensure(clock.now()).bundle, launch_release()
    specs = [_launch_spec(call, bundle, release) for call in calls]
    machines = provider_named(calls[0].node.region.provider).launch(specs)
    for call, machine in zip(calls, machines, strict=True):
        try:
            with transaction.atomic():
                _note_launch(call, machine, clock.now())
        except Conflict as conflict:
            _note_failure([call], ProviderError(str(conflict)))


def _launch_spec(call: ProviderCall, bundle: str, release: str) -> LaunchSpec:
    node = call.node
    region = node.region.name
    expires_at = clock.now() + JOIN_TOKEN_TTL
    token = join_token_issue(kind=AgentKind.NODE, subject=node.id, region=region, expires_at=expires_at)
    return LaunchSpec(
        id=node.id,
        kind=AgentKind.NODE,
        region=region,
        join_token=token,
        bundle=bundle,
        instance_type=node.instance_type_id,
        near=tuple(call.near),
        markets=tuple(node.markets),
        release=release,
        unit=call.unit,
    )


def _note_launch(call: ProviderCall, machine: Machine, now: datetime) -> None:
    """Starts the wait for its agent. A machine of a node that was given back in the meantime is terminated."""
    if not call_end(call):
        is_ordered = ProviderCall.objects.filter(node_id=call.node_id).exists()
        left = Node.objects.filter(id=call.node_id, state=NodeState.RETIRED)
        if not is_ordered and left.update(terminated_at=None):
            reason = "it was launched after its node had been given back"
            provider_order(node=call.node_id, action=ProviderAction.TERMINATE, reason=reason, now=now)
        return
    Node.objects.filter(id=call.node_id, state=NodeState.JOINING).update(state_since=now, reason=call.reason)
    machine_store(node=call.node_id, machine=machine)
    machine_launched(call.node, now=now)
    machines_forget([call.node_id], now=now)


def _terminate_machine(call: ProviderCall) -> None:
    provider_named(call.node.region.provider).terminate(call.node_id)
    with transaction.atomic():
        if call_end(call):
            Node.objects.filter(id=call.node_id).update(terminated_at=clock.now())
            machine_ended(call.node, now=clock.now())
            MachineStatus.objects.filter(node_id=call.node_id).delete()


def _restart_agent(call: ProviderCall) -> None:
    node = call.node
    provider_named(node.region.provider).restart_agent(node.id)
    now = clock.now()
    with transaction.atomic():
        if not call_end(call):
            return
        machines_forget([node.id], now=now)
        repair_record(node=node.id, what="agent_restart", reason=call.reason, now=now)
        said = f"{node.id}: {call.reason}; started it again"
        node_event(node, "node.agent_restarted", said, now=now, tone=Tone.WARN)


def _reboot_machine(call: ProviderCall) -> None:
    provider_named(call.node.region.provider).reboot(call.node_id)
    now = clock.now()
    with transaction.atomic():
        if call_end(call):
            machines_forget([call.node_id], now=now)
            said = f"{call.node_id}: its machine is rebooted: {call.reason}"
            node_event(call.node, "node.rebooted", said, now=now, tone=Tone.MOVING)


CARRY_OUT: Mapping[ProviderAction, Callable[[ProviderCall], None]] = {
    ProviderAction.RESTART_AGENT: _restart_agent,
    ProviderAction.REBOOT: _reboot_machine,
    ProviderAction.TERMINATE: _terminate_machine,
}


def _note_failure(calls: Sequence[ProviderCall], error: ProviderError) -> None:
    """In one transaction, so that the launches of a unit stay together."""
    calls_text = ", ".join(str(call) for call in calls)
    log.log(logging.WARNING if error.may_repeat else logging.ERROR, "%s: %s", calls_text, error)
    now = clock.now()
    with transaction.atomic():
        for call in calls:
            _note_one_failure(call, error, now)


def _note_one_failure(call: ProviderCall, error: ProviderError, now: datetime) -> None:
    """A refused launch loses the node, and one that may succeed later waits; an agent that did not start is found dead
    again; a refused reboot ends its attempt; a failed termination is retried."""
    is_launch = call.action == ProviderAction.LAUNCH
    may_repeat = error.may_repeat and call.action in (ProviderAction.LAUNCH, ProviderAction.REBOOT)
    if call.action == ProviderAction.TERMINATE or may_repeat:
        next_try = call_retry(call, now=now, retry_after_s=error.retry_after_s)
        if is_launch and next_try is not None:
            launch_waits(node=call.node_id, reason=str(error), next_try=next_try, now=now)
        return
    if call.action == ProviderAction.REBOOT and call_end(call):
        repair_refused(node=call.node_id, reason=str(error), now=now)
    elif call_end(call) and is_launch:
        what = "its machine has ended" if isinstance(error, AttemptEnded) else "its launch failed"
        launch_failed(node=call.node_id, reason=f"{what}: {error}", now=now)
        wake_ups.send("fleet.reconcile")
    machines_forget([call.node_id], now=now)
