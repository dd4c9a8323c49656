"""Builds and weights that a node fetches in advance: ordered once, reported, shown, and handed out by the control
plane's host."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from asgiref.sync import async_to_sync
from django.test import Client

from controlplane.dashboard.templatetags.switchyard import gib
from engine_agent.protocol.messages import Artifact
from engine_agent.protocol.telemetry_messages import NodeArtifact, NodeBuild, NodeTelemetry, Prefetched
from fleet.agents.services.enrolment import credential_issue
from fleet.nodes.models import Node, NodeReport
from fleet.nodes.selectors import desired_for
from fleet.nodes.services.nodes import prefetch_order
from fleet.reconcile.planning.decisions import OrderPrefetch
from fleet.reconcile.planning.snapshot import Holdings
from fleet.reconcile.planning.states import CellState, NodeState
from fleet.reconcile.selectors.snapshot import fleet_view
from fleet.reconcile.services import reconcile
from kernel import clock
from kernel.models import Event
from kernel.transitions import StaleDecision
from models_registry.builds.models import EngineBuild
from models_registry.builds.services.builds import build_add
from models_registry.versions.models import ModelVersion
from tests.engine_agent.engines.builds.packed import small_build
from tests.fleet import rows
from tests.fleet.rows import NOW
from tests.models_registry.rows import artifact

pytestmark = pytest.mark.django_db

HELD = Prefetched(
    (
        NodeArtifact("sha256:w", 5, peer_bytes=1 << 30, memory_bytes=2 << 30),
        NodeArtifact("sha256:x", fetching="1 of 2 GB"),
    ),
    {"sha256:y": "no room"},
)


@pytest.fixture
def weights(tmp_path: Path, settings: Any) -> Artifact:
    settings.ARTIFACT_SOURCES = [tmp_path.as_uri()]
    folder = tmp_path / "weights"
    return Artifact(folder.as_uri(), artifact(folder, {"a folder/model 1": b"12345", "config.json": b"{}"}).digest)


@pytest.fixture
def version(weights: Artifact, tmp_path: Path) -> ModelVersion:
    build = build_add(name="tiny-1", uri=small_build(tmp_path / "small").as_uri(), actor="ada", now=NOW)
    return rows.version(
        nodes=1, engine="generic", engine_options={"command": "llama-cpp"}, engine_build=build.name,
        artifact_uri=weights.uri, artifact_digest=weights.digest,
    )  # fmt: skip


def order(*versions: str, seen: tuple[str, ...] = ()) -> None:
    prefetch_order(OrderPrefetch("n-00000001", seen, versions, "a test"), now=NOW)


def test_an_order_names_the_build_and_the_weights_and_is_given_once(version: ModelVersion, weights: Artifact) -> None:
    node = rows.node("n-00000001")
    order(version.reference, "gone@1")
    with pytest.raises(StaleDecision):
        order("another@1")
    desired = desired_for([node.id])[node.id]
    assert desired.version == node.desired_version + 1
    assert desired.prefetch is not None
    assert desired.prefetch.artifacts == (weights,)
    assert desired.prefetch.builds == (EngineBuild.objects.get().ordered(),)
    assert Event.objects.get(kind="node.prefetch").message == (
        "n-00000001 fetches sim-70b@1 and gone@1 in advance: a test"
    )
    order(seen=(version.reference, "gone@1"))
    assert desired_for([node.id])[node.id].prefetch is None
    assert Event.objects.filter(kind="node.prefetch").count() == 1


def test_planners_see_what_a_node_holds_and_what_a_version_needs(version: ModelVersion, weights: Artifact) -> None:
    rows.deployment()
    telemetry = NodeTelemetry(builds=(NodeBuild("sha256:b"), NodeBuild("sha256:c", fetching="…")), prefetched=HELD)
    reported = msgspec.to_builtins(telemetry)
    rows.node("n-00000001", prefetch=["m@1"], report={"telemetry": reported})
    rows.node("n-00000002")
    view = fleet_view(now=NOW)
    held = Holdings(frozenset({"sha256:b", "sha256:w"}), {"sha256:y": "no room"})
    assert view.nodes["n-00000001"].report.holdings == held
    assert view.nodes["n-00000001"].prefetch == ("m@1",)
    assert view.nodes["n-00000002"].report.holdings is None
    assert view.deployments["sim-70b"].needs == {EngineBuild.objects.get().digest, weights.digest}


def test_a_pass_lets_a_spare_fetch_what_its_deployment_needs(version: ModelVersion) -> None:
    rows.deployment(cells=1, nodes=1)
    rows.cell("sim-70b-us-east-1-1", rows.node("n-00000001", report={"last_seen_at": clock.now()}))
    rows.node("n-00000002", report={"last_seen_at": clock.now()})
    reconcile()
    assert Node.objects.get(id="n-00000002").prefetch == [version.reference]
    assert Node.objects.get(id="n-00000001").prefetch == []


def test_the_page_of_a_node_shows_what_it_holds_and_fetches(admin_client: Client) -> None:
    rows.version()
    rows.node("n-00000001", prefetch=["sim-70b@1"])
    NodeReport.objects.update(telemetry=msgspec.to_builtins(NodeTelemetry(prefetched=HELD)))
    page = admin_client.get("/nodes/n-00000001/").content.decode()
    words = ("1 of 2 GB", "complete", "no room", "Fetched in advance", "/models/sim-70b@1/")
    for text in (*words, gib(1 << 30), gib(2 << 30)):
        assert text in page, text


def content_of(answer: Any) -> bytes:
    async def read() -> bytes:
        return b"".join([chunk async for chunk in answer.streaming_content])

    content = async_to_sync(read)()
    for close in answer._resource_closers:
        close()
    return content


def test_nodes_fetch_the_files_of_weights_that_versions_name_and_no_other_file(
    version: ModelVersion, weights: Artifact, tmp_path: Path
) -> None:
    rows.node("n-00000001")
    node = credential_issue(kind="node", subject="n-00000001", region="us-east-1", now=clock.now())

    def fetch(path: str, credential: str = node, **headers: str) -> Any:
        sent = {"Authorization": f"Bearer {credential}", **headers}
        return Client().get(f"/agents/artifacts/{path}", headers=sent)

    own = weights.digest.removeprefix("sha256:")
    assert fetch(own).json() == {"a folder/model 1": 5, "config.json": 2}
    assert content_of(fetch(f"{own}/a%20folder/model%201")) == b"12345"
    assert content_of(fetch(f"{own}/a%20folder/model%201", Range="bytes=3-")) == b"45"
    assert content_of(fetch(f"{own}/manifest.json")) == (tmp_path / "weights/manifest.json").read_bytes()
    (tmp_path / "weights/secret").write_bytes(b"s")
    for name in ("secret", "..", "../small/build.json", "a%20folder", "manifest.json/"):
        assert fetch(f"{own}/{name}").status_code in (301, 404), name
    assert fetch("0" * 64).status_code == fetch("..").status_code == 404
    for credential in ("sw_00000000000000_nobody", ""):
        assert fetch(own, credential).status_code == 403
    (tmp_path / "weights/config.json").unlink()
    (tmp_path / "weights/config.json").symlink_to("/etc/passwd")
    assert fetch(own).status_code == 404


def test_weights_of_adapters_and_outside_the_sources_are_told_apart(
    version: ModelVersion, weights: Artifact, tmp_path: Path, settings: Any
) -> None:
    rows.node("n-00000001")
    node = credential_issue(kind="node", subject="n-00000001", region="us-east-1", now=clock.now())
    named = {"name": "tuned", "artifact_uri": weights.uri, "artifact_digest": weights.digest}
    ModelVersion.objects.update(artifact_uri="", artifact_digest="", engine="sim", engine_build="", adapters=[named])

    def status() -> int:
        path = f"/agents/artifacts/{weights.digest.removeprefix('sha256:')}"
        return Client().get(path, headers={"Authorization": f"Bearer {node}"}).status_code

    assert status() == 200
    settings.ARTIFACT_SOURCES = [(tmp_path / "elsewhere").as_uri()]
    assert status() == 404


def test_nodes_are_told_who_holds_an_artifact() -> None:
    digests = {name: name * 64 for name in "abcde"}
    held = Prefetched(
        (
            NodeArtifact(f"sha256:{digests['a']}", 5, is_offered=True),
            NodeArtifact(f"sha256:{digests['b']}", fetching="1 of 2 GB", is_offered=True),
            NodeArtifact(f"sha256:{digests['c']}", 5),
        )
    )
    builds = (NodeBuild(f"sha256:{digests['d']}"),)
    telemetry = NodeTelemetry(builds=builds, offered_caches=(digests["e"],), prefetched=held)
    reported = {"telemetry": msgspec.to_builtins(telemetry)}
    rows.node("n-00000001", address="10.0.0.1")
    rows.node("n-00000002", address="10.0.0.2", report=reported)
    rows.node("n-00000003", address="10.0.0.3", connected=False, report=reported)
    rows.node("n-00000004", address="10.0.0.4", state=NodeState.SUSPECT.value, report=reported)
    rows.node("n-00000005", address="10.0.0.5", cordoned=True, report=reported)
    rows.node("n-00000006", where="us-west-2", address="10.0.0.6", report=reported)
    drains = rows.node("n-00000007", address="10.0.0.7", report=reported)
    rows.cell("sim-70b-us-east-1-1", drains, state=CellState.DRAINING.value)
    credentials = {
        kind: credential_issue(kind=kind, subject="n-00000001", region="us-east-1", now=clock.now())
        for kind in ("node", "machine")
    }

    def named(digest: str, kind: str = "node") -> Any:
        sent = {"Authorization": f"Bearer {credentials.get(kind, '')}"}
        return Client().get(f"/agents/holders/{digest}", headers=sent)

    one = [{"node": "n-00000002", "address": "10.0.0.2", "port_base": Node.objects.get(id="n-00000002").port_base}]
    assert [named(digests[name]).json() for name in "abcde"] == [one, one, [], one, one]
    assert named("0" * 64).json() == named("*").json() == []
    assert [named(digests["a"], kind).status_code for kind in ("machine", "")] == [403, 403]
