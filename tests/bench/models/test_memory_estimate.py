"""Memory estimates agree with vLLM's own figures for each kind of attention."""

import pytest

from bench import CACHE
from bench.models.memory_estimate import compare, report
from engine_agent.engines.vllm.environment import install
from lab.checkpoints import CONFIGS

pytestmark = [pytest.mark.vllm, pytest.mark.long]


def test_estimates_are_within_a_tenth() -> None:
    found = compare(list(CONFIGS), install(CACHE, print))
    wrong = {
        (each.kind, name): ratio for each in found for name, ratio in each.ratios().items() if not 0.9 <= ratio <= 1.1
    }
    assert not wrong, report(found)
