"""A compromised node or ingress sends anything that the protocol allows: all other reports are still stored, every
control loop completes its pass, and every page and resource about it is served. `SWITCHYARD_FUZZ=2000` tries that many
messages."""

import json
import os
from collections.abc import Callable, Iterator
from copy import deepcopy
from itertools import cycle
from typing import Any

import msgspec
import pytest
from django.contrib.auth import get_user_model
from django.test import Client
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_agent.protocol.codec import BadMessage, decode_up, encode
from engine_agent.protocol.ingress_messages import (
    CellTraffic,
    IngressObserved,
    IngressReport,
    IngressTelemetry,
    KeyCounts,
    PoolTraffic,
)
from engine_agent.protocol.load_messages import ClassLoad, Load, TokenCheck, UsageRow
from engine_agent.protocol.messages import Fault, Health, Hello, Inventory, LogTail, Observed, Report, StepTimes
from engine_agent.protocol.states import AgentKind, EngineState
from engine_agent.protocol.telemetry_messages import Accelerator, NodeTelemetry
from fleet.agents.consumers.handlers import NodeHandler
from fleet.agents.consumers.hub import AgentHandler, AgentSession
from fleet.agents.services.enrolment import AgentIdentity
from fleet.load.services import load_sample
from fleet.nodes.models import Node, NodeReport
from fleet.reconcile.planning.planner import PLANNERS
from fleet.reconcile.planning.settings import FleetSettings
from fleet.reconcile.selectors.snapshot import LISTENING_LEASE, fleet_view
from kernel import clock
from kernel.leases import lease_take
from tests.fleet import rows
from tests.fleet.agents.agent_client import hello
from tests.fleet.agents.test_fault_limits import session_of
from traffic.region_shares.services.autopilot import autopilot_run
from traffic.routing import models
from traffic.routing.consumers import IngressHandler
from traffic.routing.services.ingresses import ingress_create
from traffic.routing.services.tables import drained_cells_mark, tables_publish
from traffic.usage.services.counting import usage_count

pytestmark = pytest.mark.django_db(transaction=True)

TRIES = int(os.environ.get("SWITCHYARD_FUZZ", "12"))
QUICK = settings(max_examples=TRIES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=TRIES < 100)
CELL = "sim-70b-us-east-1-1"
REPORT = Report(
    seq=7,
    observed=Observed(EngineState.READY, CELL, 1, 0, "", 42),
    health=Health(ok=True, probe_ms=1.5, checked_s_ago=0.5),
    load=Load(
        in_flight=1,
        ttft_p50_ms=3.0,
        requests_total=9,
        ttft_counts={3: 9},
        classes={"realtime": ClassLoad(in_flight=1, requests_total=9)},
        usage=(UsageRow(1.0, "acme", "0a0b0c0d", requests_total=9, prompt_tokens_total=90),),
        token_check=TokenCheck(1.0, 90, 9, 90, 9),
    ),
    telemetry=NodeTelemetry(
        host_cpu_percent=5.0,
        accelerators=(Accelerator(0, "nvidia", "H200", 1, 5.0, 1, 2, {"ecc": 0}),),
        accelerator_trouble={"nvidia": "old"},
    ),
    steps=StepTimes(steps={3: 9}, compute_ms={3: 27.0}),
)
INGRESS_REPORT = IngressReport(
    seq=7,
    observed=IngressObserved(1, 42, "", {CELL: "up"}),
    cells={CELL: CellTraffic(in_flight=1, requests_total=9, reason="x")},
    telemetry=IngressTelemetry(
        7, {"sim-70b": PoolTraffic(requests_total=9, spilled_to={"us-west-2": 1})}, KeyCounts("7@1", {"0a": (1, 2, 3)})
    ),
)
HELLO = hello("n-a", inventory=Inventory("local.cpu", "127.0.0.1", 40_000, 8, 2**33, ("nvidia 0: H200",)))
odd = st.one_of(
    st.sampled_from([-1, 0, 2**31, 2**63, -(2**63), 2**64, 10**300, 1e308, -1e308, 5e-324, 0.1, True, None]),
    st.sampled_from(["", "\x00", "\ud800", "x" * 5000, "~others", CELL, "c-other", "<script>", "realtime", "ready"]),
    st.sampled_from([[], {}, [None], {"": {}}, {"1e9": 1}, {"-1": -1}, {"a\x00": {"requests_total": 2**63}}]),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields every place in a JSON value, nested ones included."""
    if path:
        yield path
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in parts:
        yield from places(part, (*path, name))


def with_odd(message: Any) -> st.SearchStrategy[bytes]:
    """Messages that differ in up to three places: another value, or another name for it."""
    text = json.loads(encode(message))
    return st.lists(st.tuples(st.sampled_from(list(places(text))), odd, st.booleans()), min_size=1, max_size=3).map(
        lambda changes: _changed(text, changes)
    )


def _changed(text: Any, changes: list[tuple[tuple[Any, ...], Any, bool]]) -> bytes:
    changed = deepcopy(text)
    for path, value, as_name in changes:
        around = changed
        for name in path[:-1]:
            around = around[name] if isinstance(around, dict | list) and name in _names(around) else None
        if isinstance(around, dict) and as_name and isinstance(value, str | int | float):
            around[str(value)] = around.get(path[-1])
        elif isinstance(around, dict | list) and path[-1] in _names(around):
            around[path[-1]] = value
    return json.dumps(changed).encode()


def _names(around: dict[str, Any] | list[Any]) -> Any:
    return around if isinstance(around, dict) else range(len(around))


def ingress_session(region: str) -> AgentSession:
    session, ingress = session_of(f"i-{region}"), f"i-{region}"
    session.identity = AgentIdentity(AgentKind.INGRESS, ingress, region, ingress)
    return session


def deliver(handler: AgentHandler, session: AgentSession, frame: bytes) -> None:
    """Passes a message on as the socket does: invalid ones are dropped."""
    try:
        message = decode_up(frame)
    except BadMessage:
        return
    handler.on_message(session, message)


def run_loops() -> None:
    """Runs every control loop. Decisions of the fleet's planners are not carried out, so that both nodes stay."""
    now, chosen = clock.now(), FleetSettings()
    view = fleet_view(now=now, settings=chosen)
    for planner in PLANNERS:
        planner(view, chosen, now)
    autopilot_run(now=now)
    tables_publish(now=now)
    drained_cells_mark(now=now)
    load_sample(now=now)
    usage_count(now=now)


def page_requests(client: Client, *urls: str) -> Callable[[], None]:
    """Requests its pages, and those of its cells and deployments, at each call."""
    turn = cycle([*urls, "/", f"/cells/{CELL}/", "/api/v1/cells/", "/deployments/sim-70b/", "/incidents/"])

    def look() -> None:
        url = next(turn)
        assert client.get(url).status_code == 200, url

    return look


@pytest.fixture
def client() -> Client:
    client = Client()
    client.force_login(get_user_model().objects.create_superuser("root"))
    lease_take(name=LISTENING_LEASE, holder="web", ttl_s=3600, now=clock.now())
    return client


@pytest.mark.slow
def test_whatever_one_node_says(client: Client) -> None:
    rows.cell(CELL, rows.node("n-a"), rows.node("n-b"))
    handler, other = NodeHandler(), session_of("n-b")
    look = page_requests(client, "/nodes/n-a/", "/api/v1/nodes/", "/nodes/", "/metrics")
    said = [REPORT, REPORT, Fault("xid-79", "lost", {"pid": 1}), LogTail(CELL, 1, {"agent": ("a", "b")})]

    @QUICK
    @given(st.one_of([with_odd(message) for message in said]), st.integers(1, 2**31 - 1))
    def check(frame: bytes, pid: int) -> None:
        deliver(handler, session_of("n-a"), frame)
        deliver(handler, other, encode(Report(1, msgspec.structs.replace(REPORT.observed, engine_pid=pid))))
        handler.flush()
        assert NodeReport.objects.get(node="n-b").engine_pid == pid
        run_loops()
        look()

    check()


def test_any_hello_of_one_node() -> None:
    rows.node("n-a")
    rows.node("n-b")
    handler = NodeHandler()

    @QUICK
    @given(with_odd(HELLO), st.text("ab", min_size=1, max_size=20))
    def check(frame: bytes, rack: str) -> None:
        try:
            message = decode_up(frame)
        except BadMessage:
            return
        assert isinstance(message, Hello)
        refused = handler.on_hellos([msgspec.structs.replace(message, id="n-a"), hello("n-b", topology=("x", rack))])
        assert "n-b" not in refused
        assert Node.objects.get(id="n-b").topology == ["x", rack]

    check()


@pytest.mark.slow
def test_whatever_one_ingress_says(client: Client) -> None:
    rows.cell(CELL, rows.node("n-a"), rows.node("n-b"))
    for region in ("us-east-1", "us-west-2"):
        ingress_create(region=rows.region(region), address="127.0.0.1", port=8080, now=clock.now())
    tables_publish(now=clock.now())
    handler, other = IngressHandler(), ingress_session("us-west-2")
    look = page_requests(client, "/traffic/", "/api/v1/ingresses/", "/keys/", "/metrics")

    @QUICK
    @given(with_odd(INGRESS_REPORT), st.integers(1, 2**31 - 1))
    def check(frame: bytes, pid: int) -> None:
        deliver(handler, ingress_session("us-east-1"), frame)
        deliver(handler, other, encode(IngressReport(1, IngressObserved(1, pid))))
        handler.flush()
        assert models.IngressReport.objects.get(ingress="i-us-west-2").haproxy_pid == pid
        run_loops()
        look()

    check()
