"""Models and model versions over HTTP."""

from typing import Any

import pytest

from models_registry.versions.models import Model, ModelVersion
from tests.controlplane.api.client import bearer, rules
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _smollm2_and_a_simulated_model() -> None:
    for name, engine in (("smollm2", "vllm"), ("sim-70b", "sim")):
        model = Model.objects.create(name=name, description=f"on {engine}", created_at=NOW)
        for version in ("1", "2"):
            ModelVersion.objects.create(
                model=model,
                version=version,
                engine=engine,
                state="released" if version == "1" else "draft",
                parallelism={"local.cpu": {"nodes": 1, "tp": 1}},
                engine_options={"enforce_eager": True, "seed": 7},
                engine_env={"VLLM_CPU_KVCACHE_SPACE": "1"},
                golden_prompts=[{"prompt": "2 + 2 =", "expect": "4"}],
                created_at=NOW,
            )


def test_a_model_names_its_versions() -> None:
    assert bearer().get("/api/v1/models/smollm2").json() == {
        "name": "smollm2",
        "description": "on vllm",
        "versions": ["smollm2@2", "smollm2@1"],
        "created_at": "2026-11-21T12:00:00Z",
    }


def test_a_model_is_created_once() -> None:
    body = {"name": "llama", "description": "eight billion"}
    created = bearer().post("/api/v1/models", body, format="json").json()
    assert (created["name"], created["description"], created["versions"]) == ("llama", "eight billion", [])
    taken = bearer().post("/api/v1/models", body, format="json")
    assert (taken.status_code, taken.json()["detail"]) == (409, "model 'llama' already exists")


@pytest.mark.parametrize(
    ("body", "broken"),
    [
        ({}, {"name": "required"}),
        ({"name": "a b"}, {"name": "invalid"}),
        ({"name": "llama", "size": 8}, {"size": "unknown"}),
    ],
)
def test_a_model_that_cannot_be_is_refused_by_name(body: dict[str, Any], broken: dict[str, str]) -> None:
    assert rules(bearer().post("/api/v1/models", body, format="json")) == broken


def test_models_are_found_by_the_engine_of_a_version() -> None:
    assert [row["name"] for row in bearer().get("/api/v1/models?engine=sim").json()["results"]] == ["sim-70b"]


def test_a_version_says_how_it_is_served() -> None:
    assert bearer().get("/api/v1/model-versions/smollm2@1").json() == {
        "id": "smollm2@1",
        "model": "smollm2",
        "version": "1",
        "state": "released",
        "tone": "ok",
        "reason": "",
        "revision": 1,
        "engine": "vllm",
        "engine_build": "",
        "artifact_uri": "",
        "artifact_digest": "",
        "context_length": 2048,
        "max_concurrency": 16,
        "ready_timeout_s": 300.0,
        "attention_heads": None,
        "kv_heads": None,
        "layers": None,
        "parallelism": {"local.cpu": {"nodes": 1, "tp": 1}},
        "speculation": {},
        "quantization": {},
        "adapters": [],
        "roles": {},
        "by_type": {},
        "modalities": [],
        "engine_options": {"enforce_eager": True, "seed": 7},
        "engine_env": {"VLLM_CPU_KVCACHE_SPACE": "1"},
        "golden_prompts": [{"prompt": "2 + 2 =", "expect": "4"}],
        "golden_waiver": "",
        "renderings": [
            {
                "instance_type": "local.cpu",
                "engine": "vllm",
                "artifact_uri": "",
                "artifact_digest": "",
                "max_concurrency": 16,
                "problem": "smollm2@1: engine vllm needs artifact_uri, the location of the weights",
                "degrees": None,
                "arguments": [],
                "notes": [],
            }
        ],
        "validation": None,
        "created_at": "2026-11-21T12:00:00Z",
        "state_since": None,
    }


def test_a_version_shows_what_it_is_on_every_instance_type() -> None:
    ModelVersion.objects.filter(model_id="smollm2", version="1").update(
        artifact_uri="file:///weights",
        attention_heads=9,
        kv_heads=3,
        speculation={"method": "ngram", "tokens": 3},
        parallelism={"local.cpu": {"nodes": 3}, "p5.48xlarge": {}, "own.gpu": {}},
    )
    shown = bearer().get("/api/v1/model-versions/smollm2@1").json()["renderings"]
    local, own, p5 = shown
    assert local["degrees"] == {"nodes": 3, "tp": 3, "cp": 1, "dp": 1, "pp": 1}
    assert local["arguments"][-4::2] == ["--speculative-config", "--tensor-parallel-size"]
    assert own["problem"].startswith(
        "unknown instance type 'own.gpu'; `switchyard get instance-types` lists the known ones"
    )
    assert p5["problem"].endswith("tp is 8; it must divide 9 attention heads: use one of 1, 3")


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("", ["sim-70b@2", "sim-70b@1", "smollm2@2", "smollm2@1"]),
        ("model=smollm2", ["smollm2@2", "smollm2@1"]),
        ("engine=sim", ["sim-70b@2", "sim-70b@1"]),
        ("state=released", ["sim-70b@1", "smollm2@1"]),
        ("state=draft&state=retired&model=sim-70b", ["sim-70b@2"]),
    ],
)
def test_versions_are_found_by_what_they_are(query: str, found: list[str]) -> None:
    assert [row["id"] for row in bearer().get(f"/api/v1/model-versions?{query}").json()["results"]] == found


@pytest.mark.parametrize("reference", ["smollm2@3", "other@1"])
def test_a_version_that_is_not_there_is_not_found(reference: str) -> None:
    assert bearer().get(f"/api/v1/model-versions/{reference}").status_code == 404


def test_a_model_is_described_anew_and_deleted_once_it_has_no_versions() -> None:
    client, path = bearer(), "/api/v1/models/sim-70b"
    changed = client.patch(path, {"description": "simulated"}, format="json")
    assert changed.json()["description"] == "simulated"
    refused = client.delete(path, headers={"if-match": changed["ETag"]})
    assert refused.status_code == 409
    assert "has 2 versions" in refused.json()["detail"]
    ModelVersion.objects.all().delete()
    assert client.delete(path).status_code == 428
    assert client.delete(path, headers={"if-match": client.get(path)["ETag"]}).status_code == 200
    assert client.get(path).status_code == 404
