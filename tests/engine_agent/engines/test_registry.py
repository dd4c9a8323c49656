"""Engines are found by name."""

from pathlib import Path

import pytest

from engine_agent.engines.base import EngineUnavailable
from engine_agent.engines.registry import engine_adapter, engine_pythons


@pytest.mark.parametrize("engine", ["generic", "neuron", "sim", "vllm"])
def test_an_adapter_answers_to_its_name(engine: str) -> None:
    assert engine_adapter(engine).name == engine


def test_an_unknown_engine_is_refused_with_the_known_ones() -> None:
    with pytest.raises(EngineUnavailable, match="unknown engine 'abacus'; this agent knows generic, neuron, sim, vllm"):
        engine_adapter("abacus")


def test_an_empty_cache_has_no_engine_environments(tmp_path: Path) -> None:
    assert engine_pythons(tmp_path) == {}
