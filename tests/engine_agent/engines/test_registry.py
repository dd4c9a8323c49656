from pathlib import Path

import pytest
from msgspec import structs

from engine_agent.engines.base import EngineUnavailable
from engine_agent.engines.registry import ADAPTERS, check_role, engine_adapter, engine_pythons
from engine_agent.protocol.messages import EnginePlan
from engine_agent.protocol.states import CellRole
from tests.engine_agent.engines.contexts import peer
from tests.engine_agent.orders import assignment


@pytest.mark.parametrize("engine", sorted(ADAPTERS))
def test_an_adapter_answers_to_its_name(engine: str) -> None:
    assert engine_adapter(engine).name == engine


def test_an_unknown_engine_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        EngineUnavailable,
        match=r"unknown engine 'abacus'; this agent knows generic, .*, sim, tensorrt-llm, triton, vllm",
    ):
        engine_adapter("abacus")


def test_an_empty_cache_has_no_engine_environments(tmp_path: Path) -> None:
    assert engine_pythons(tmp_path) == {}


@pytest.mark.parametrize(
    ("engine", "nodes", "layout", "reason"),
    [
        ("neuron", 1, "a", "engine neuron cannot be a decode cell: sim and vllm can"),
        ("vllm", 2, "a", "a decode cell has one node, and this one has 2"),
        ("sim", 1, "", "names no KV layout"),
        ("vllm", 1, "a", ""),
    ],
)
def test_a_role_that_a_cell_cannot_have_is_refused(engine: str, nodes: int, layout: str, reason: str) -> None:
    plan = EnginePlan(engine, "m", 8, 60.0)
    peers = tuple(peer(rank) for rank in range(nodes))
    given = structs.replace(assignment(plan=plan, peers=peers), cell_role=CellRole.DECODE, kv_layout=layout)
    check_role(structs.replace(given, cell_role=CellRole.MIXED))
    if not reason:
        check_role(given)
        return
    with pytest.raises(EngineUnavailable, match=reason):
        check_role(given)
