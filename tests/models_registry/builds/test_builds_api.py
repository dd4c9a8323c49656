"""Engine builds over HTTP: added by admins from artifact sources, named by versions, carried by orders, handed out to
nodes, and never deleted under a version."""

import hashlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from asgiref.sync import async_to_sync
from django.test import Client
from rest_framework.test import APIClient

from engine_agent.engines.artifacts import describe_folder, write_manifest
from engine_agent.protocol.engine_builds import BUILD_FILE
from fleet.agents.services.enrolment import credential_issue
from fleet.nodes.selectors import desired_for
from kernel import clock
from kernel.access import Role
from kernel.models import Event
from lab.versions import P5, TRN1, spec
from models_registry.builds.models import EngineBuild
from models_registry.builds.selectors import build_file, wrong_build
from models_registry.versions.models import EngineAllowance, ModelVersion
from tests.controlplane.access.callers import calls, make_user
from tests.controlplane.api.client import rules
from tests.engine_agent.engines.builds.packed import facts, small_build
from tests.fleet import rows
from tests.models_registry.rows import SIM, draft

pytestmark = [pytest.mark.slow, pytest.mark.django_db]

V1 = "/api/v1"
GENERIC: dict[str, Any] = {
    "engine": "generic",
    "engine_options": {"command": "llama-cpp"},
    "artifact_uri": "file:///srv/models/toy",
}
VERSION: dict[str, Any] = {"model": "toy", "version": "2", **SIM, **GENERIC}


@pytest.fixture
def ada() -> APIClient:
    return calls(make_user("ada", Role.ADMIN))


@pytest.fixture
def folder(tmp_path: Path, settings: Any) -> Path:
    settings.ARTIFACT_SOURCES = [tmp_path.as_uri()]
    return small_build(tmp_path / "small")


def post(client: APIClient, path: str, body: dict[str, Any]) -> Any:
    return client.post(f"{V1}/{path}", body, format="json")


def add(client: APIClient, folder: Path, name: str = "llama-1", **fields: Any) -> Any:
    return post(client, "engine-builds", {"name": name, "uri": folder.as_uri(), **fields})


def test_an_admin_adds_what_the_build_states_about_itself(ada: APIClient, folder: Path) -> None:
    added = add(ada, folder)
    assert added.status_code == 200, added.json()
    row = added.json()
    assert (row["serves"], row["least_glibc"], row["parts"], row["actor"]) == ("generic/llama-cpp", "2.17", 4, "ada")
    assert row["digest"] == describe_folder(folder, {}).digest
    assert ada.get(f"{V1}/engine-builds/llama-1").json() == row
    assert Event.objects.get(kind="engine_build.added").detail["digest"] == row["digest"]
    assert add(ada, folder).status_code == 409


def test_an_operator_may_list_builds_and_not_add_or_delete_one(ada: APIClient, folder: Path) -> None:
    oscar = calls(make_user("oscar", Role.OPERATOR))
    assert add(oscar, folder).status_code == 403
    add(ada, folder)
    assert oscar.delete(f"{V1}/engine-builds/llama-1").status_code == 403
    assert [row["name"] for row in oscar.get(f"{V1}/engine-builds").json()["results"]] == ["llama-1"]


def _rewrite_facts(folder: Path, **changes: Any) -> None:
    stated = msgspec.json.decode((folder / BUILD_FILE).read_bytes())
    (folder / BUILD_FILE).write_bytes(msgspec.json.encode({**stated, **changes}))
    write_manifest(folder, describe_folder(folder, {}))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"program": "../../bin/sh"}, "program is '../../bin/sh'"),
        ({"parts": 3}, "has other files than build.json and 3 parts"),
        ({"packed_bytes": 1}, "bytes of parts; build.json says 1"),
        ({"setuid": True}, "setuid"),
    ],
)
def test_a_build_that_lies_about_itself_is_refused(
    ada: APIClient, folder: Path, changes: dict[str, Any], reason: str
) -> None:
    _rewrite_facts(folder, **changes)
    refused = add(ada, folder)
    assert rules(refused) == {"uri": "build"}
    assert reason in refused.content.decode()


def test_only_builds_in_artifact_sources_with_the_stated_digest_are_added(
    ada: APIClient, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    outside = small_build(tmp_path_factory.mktemp("outside") / "build")
    assert "outside the allowed sources" in add(ada, outside).content.decode()
    assert rules(add(ada, folder, digest="sha256:" + "0" * 64)) == {"uri": "build"}
    (folder / BUILD_FILE).write_bytes(b"{}")
    assert "is corrupt" in add(ada, folder).content.decode()
    (folder / BUILD_FILE).unlink()
    write_manifest(folder, describe_folder(folder, {}))
    assert "make a build with `switchyard engine build`" in add(ada, folder).content.decode()
    assert rules(add(ada, folder, name="No Name")) == {"name": "invalid"}


def test_a_version_names_a_build_of_its_engine(ada: APIClient, folder: Path) -> None:
    draft("1")
    EngineAllowance.objects.create(engine="generic", name="--command", why="w", actor="ada", created_at=clock.now())
    add(ada, folder)
    unknown = post(ada, "model-versions", {**VERSION, "engine_build": "llama-2"})
    assert "did you mean llama-1?" in unknown.content.decode()
    other = post(ada, "model-versions", {**VERSION, "engine": "sim", "engine_options": {}, "engine_build": "llama-1"})
    assert "the version needs one with sim" in other.content.decode()
    made = post(ada, "model-versions", {**VERSION, "engine_build": "llama-1"})
    assert made.status_code == 200, made.json()
    assert made.json()["engine_build"] == "llama-1"
    on_type = {**VERSION, "version": "3", "by_type": {"local.cpu": {"engine_build": "llama-1"}}}
    assert post(ada, "model-versions", on_type).status_code == 200
    refused = ada.delete(f"{V1}/engine-builds/llama-1")
    assert refused.status_code == 409
    assert "toy@2, toy@3" in refused.content.decode()
    ModelVersion.objects.filter(version__in=("2", "3")).update(state="retired")
    assert ada.delete(f"{V1}/engine-builds/llama-1").status_code == 200
    assert not EngineBuild.objects.exists()


def test_a_build_of_machines_images_fits_versions_of_its_release(ada: APIClient, folder: Path) -> None:
    for sdk in ("2.28", "2.29"):
        made = post(ada, "engine-builds", {"name": f"neuron-{sdk}", "uri": f"external://neuron-{sdk}"})
        assert made.status_code == 200, made.json()
    row = EngineBuild.objects.get(name="neuron-2.28")
    assert (row.serves, row.version, row.parts, row.digest == row.ordered().digest) == ("neuron", "2.28", 0, True)
    assert row.ordered().is_external
    assert build_file(row.digest.partition(":")[2], "manifest.json", ()) is None
    wrong = post(ada, "engine-builds", {"name": "x", "uri": "external://neuron-2.28", "digest": "sha256:" + "0" * 64})
    assert rules(wrong) == {"digest": "build"}
    assert wrong_build(spec("neuron", TRN1, engine_build="neuron-2.28")) == ""
    other = wrong_build(spec("neuron", TRN1, engine_build="neuron-2.29"))
    assert "neuron-2.29, of SDK 2.29; on trn1.32xlarge the version is for nxdi-2.28 of SDK 2.28" in other
    assert "the version needs one with vllm" in wrong_build(spec("vllm", P5, engine_build="neuron-2.29"))


def test_an_order_carries_the_build_and_a_deleted_one_only_its_name(ada: APIClient, folder: Path) -> None:
    add(ada, folder)
    node = rows.node("n-00000001")
    cell = rows.cell("sim-70b-us-east-1-1", node)
    ModelVersion.objects.filter(pk=cell.model_version_id).update(
        **GENERIC, engine_build="llama-1", parallelism={"local.cpu": {"nodes": 1}}
    )

    def ordered() -> Any:
        assignment = desired_for([node.id])[node.id].assignment
        assert assignment is not None
        return assignment.plan.build

    build = ordered()
    assert (build.name, build.uri, build.facts) == ("llama-1", "", EngineBuild.objects.get().facts)
    EngineBuild.objects.update(uri="s3://builds/llama-1")
    assert ordered().uri == "s3://builds/llama-1"
    EngineBuild.objects.all().delete()
    assert (ordered().name, ordered().facts) == ("llama-1", None)


def fetch(digest: str, name: str, credential: str, **headers: str) -> Any:
    sent = {"Authorization": f"Bearer {credential}", **headers}
    return Client().get(f"/agents/builds/{digest.removeprefix('sha256:')}/{name}", headers=sent)


def content_of(answer: Any) -> bytes:
    async def read() -> bytes:
        return b"".join([chunk async for chunk in answer.streaming_content])

    content = async_to_sync(read)()
    for close in answer._resource_closers:
        close()
    return content


def test_nodes_fetch_the_files_of_a_build_from_any_byte_on_and_no_other_file(
    ada: APIClient, folder: Path, tmp_path: Path
) -> None:
    digest = add(ada, folder).json()["digest"]
    rows.node("n-00000001")
    node = credential_issue(kind="node", subject="n-00000001", region="us-east-1", now=clock.now())
    part = (folder / "part-0001").read_bytes()
    whole, rest = fetch(digest, "part-0001", node), fetch(digest, "part-0001", node, Range="bytes=100-")
    assert (whole.status_code, whole["Content-Length"], content_of(whole)) == (200, str(len(part)), part)
    assert (rest.status_code, rest["Content-Range"]) == (206, f"bytes 100-{len(part) - 1}/{len(part)}")
    assert content_of(rest) == part[100:]
    assert fetch(digest, "part-0001", node, Range=f"bytes={len(part)}-").status_code == 416
    text = content_of(fetch(digest, BUILD_FILE, node))
    assert msgspec.json.decode(text, type=type(facts())) == EngineBuild.objects.get().facts
    (folder / "secret").write_bytes(b"s")
    (folder / "part-0002").unlink()
    (folder / "part-0002").symlink_to("/etc/passwd")
    for name in ("secret", "part-0004", "..", "part-0002"):
        assert fetch(digest, name, node).status_code == 404, name
    assert fetch(hashlib.sha256(b"other").hexdigest(), "part-0001", node).status_code == 404
    for credential in ("sw_00000000000000_nobody", ""):
        assert fetch(digest, "part-0001", credential).status_code == 403
