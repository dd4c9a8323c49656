"""The command line and environment of a cell proxy and an engine."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from engine_agent.cell_proxy.__main__ import parse_arguments
from engine_agent.engines.base import Launch
from engine_agent.engines.sim.adapter import SimAdapter
from engine_agent.node.launch import NodePlace, proxy_launch, with_fingerprint
from engine_agent.protocol.fingerprint import fingerprint_from, flags_digest
from engine_agent.protocol.messages import Artifact, EnginePlan
from engine_agent.protocol.ports import ENGINE
from engine_agent.protocol.states import CellRole
from tests.engine_agent.engines.contexts import PORT_BASE, context
from tests.engine_agent.orders import assignment

MACHINE = {"kernel": "6.8", "vllm.engine": "vllm 0.16.0", "sim.engine": "sim 1"}


def test_an_engine_gets_the_fields_of_its_machine_engine_flags_and_weights() -> None:
    plan = EnginePlan(
        "vllm", "m", 8, 60.0, artifact=Artifact("file:///m", "sha256:ab"), args=("--dtype", "float32"), env={"A": "1"}
    )
    launch = with_fingerprint(Launch(("python",), {"A": "1"}), plan, MACHINE)
    assert launch.argv == ("python",)
    assert launch.env["A"] == "1"
    assert fingerprint_from(launch.env) == {
        "kernel": "6.8",
        "engine": "vllm 0.16.0",
        "flags": flags_digest(("--dtype", "float32"), {"A": "1"}),
        "weights": "sha256:ab",
    }


def test_an_engine_is_reached_on_loopback_only_whatever_the_nodes_address_is() -> None:
    node = replace(context(), host="10.0.0.1")
    argv = proxy_launch(assignment(), node).argv
    assert argv[argv.index("--host") + 1] == "10.0.0.1"
    assert argv[argv.index("--engine") + 1] == f"http://127.0.0.1:{PORT_BASE + ENGINE}"
    assert "10.0.0.1" not in "".join(SimAdapter().launch(assignment(), node).argv).replace("10.0.0.1:", "")


PRIORITY = ("--scheduling-policy", "priority")


@pytest.mark.parametrize(
    ("engine", "args", "told"),
    [
        ("sim", (), True),
        ("sim", ("--batch-prompt-tokens", "0"), False),
        ("vllm", PRIORITY, True),
        ("vllm", (*PRIORITY, "--batch-prompt-tokens", "64"), True),
        ("vllm", (*PRIORITY, "--batch-prompt-tokens", "0"), False),
        ("vllm", (*PRIORITY, "--no-enable-chunked-prefill"), False),
        ("vllm", (), False),
        ("neuron", PRIORITY, False),
    ],
)
def test_a_proxy_is_told_whether_its_engine_limits_batch_prompts(
    engine: str, args: tuple[str, ...], told: bool
) -> None:
    launch = proxy_launch(assignment(plan=EnginePlan(engine, "m", 8, 60.0, args=args)), context())
    assert ("--orders-classes" in launch.argv) is told


@pytest.mark.parametrize(
    ("engine", "args", "told"),
    [
        ("sim", (), True),
        ("vllm", ("--enforce-eager", "--scheduling-policy", "priority"), True),
        ("vllm", ("--scheduling-policy", "fcfs", "--served-model-name", "priority"), False),
        ("vllm", (), False),
    ],
)
def test_a_proxy_is_told_whether_its_engine_schedules_by_priority(
    engine: str, args: tuple[str, ...], told: bool
) -> None:
    plan = EnginePlan(engine, "m", 8, 60.0, args=args)
    launch = proxy_launch(assignment(plan=plan), context())
    assert ("--priorities" in launch.argv) is told


@pytest.mark.parametrize(
    ("engine", "config", "told"),
    [
        ("neuron", {"max_prompt_length": 1024, "override_neuron_config": {}}, ["--max-prompt-tokens", "1024"]),
        ("neuron", {"override_neuron_config": {}}, []),
        ("vllm", {"max_prompt_length": 1024}, []),
    ],
)
def test_a_proxy_is_told_of_the_prompts_that_would_end_its_engine(
    engine: str, config: dict[str, Any], told: list[str]
) -> None:
    plan = EnginePlan(engine, "m", 8, 60.0, args=("--additional-config", json.dumps(config)))
    argv = proxy_launch(assignment(plan=plan), context()).argv
    at = argv.index("--max-prompt-tokens") if "--max-prompt-tokens" in argv else len(argv)
    assert list(argv[at : at + 2]) == told


def test_only_a_launch_asks_which_engines_are_installed(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.touch()
    asked: list[int] = []

    def installed() -> dict[str, Path]:
        asked.append(1)
        return {"vllm": python, "sim": tmp_path / "gone"}

    place = NodePlace("n-1", tmp_path, "127.0.0.1", PORT_BASE, tmp_path, tmp_path / "fetched", installed)
    assert (place.context().node_id, asked) == ("n-1", [])
    assert place.launch_context() == replace(place.context(), engine_pythons={"vllm": python})


def test_the_proxy_is_told_its_cells_role_and_layout() -> None:
    given = structs.replace(assignment(), cell_role=CellRole.DECODE, kv_layout="a94f")
    settings = parse_arguments(list(proxy_launch(given, context()).argv[3:]))
    assert (settings.cell_role, settings.kv_layout) == (CellRole.DECODE, "a94f")
    assert "--cell-role" not in proxy_launch(assignment(), context()).argv
