"""The requests that `neuron_on_cpu` sends to a cell, and the settings that it gives it."""

from collections.abc import Sequence

import pytest

from bench.models.neuron_cell import REQUESTS, SLOTS, Request, serve
from bench.models.neuron_on_cpu import CASES, MACHINES, cases_on, checked, settings_of, version_of
from engine_agent.protocol.neuron_targets import TARGET_BY_NAME


class Cache:
    """A model whose next token is a digest of all that its slot holds, as attention over the cache would be."""

    def __init__(self) -> None:
        self.slots: dict[int, list[int]] = {}
        self.most_at_once = 0

    def prefill(self, slot: int, prompt: Sequence[int]) -> int:
        self.slots[slot] = list(prompt)
        return self._next(slot)

    def decode(self, last: Sequence[tuple[int, int, int]]) -> list[int]:
        self.most_at_once = max(self.most_at_once, len(last))
        for slot, token, position in last:
            assert position == len(self.slots[slot]), "each token is written behind the one before"
            self.slots[slot].append(token)
        return [self._next(slot) for slot, _, _ in last]

    def _next(self, slot: int) -> int:
        return sum(place * token for place, token in enumerate(self.slots[slot], start=1)) % 251


def alone(request: Request) -> list[int]:
    cache = Cache()
    return serve([request], 1, cache.prefill, cache.decode)[0]


def test_texts_that_go_on_together_are_those_of_each_alone() -> None:
    cache = Cache()
    texts = serve(REQUESTS, SLOTS, cache.prefill, cache.decode)
    assert texts == [alone(request) for request in REQUESTS]
    assert [len(text) for text in texts] == [request.tokens for request in REQUESTS]
    assert cache.most_at_once == SLOTS, "the slots are full at some step"
    assert len(REQUESTS) > SLOTS, "and used again"


def test_a_request_of_one_token_leaves_its_slot_at_once() -> None:
    cache = Cache()
    requests = (Request(0, (1, 2), 1), Request(0, (3,), 2))
    assert serve(requests, 1, cache.prefill, cache.decode) == [alone(request) for request in requests]


@pytest.mark.parametrize("target", MACHINES)
def test_every_case_is_rendered_for_the_target_and_its_machines(target: str) -> None:
    for machine in MACHINES[target]:
        for case in cases_on(machine):
            settings = settings_of(version_of(case, machine, TARGET_BY_NAME[target]), machine)
            assert settings["tp_degree"] == case.degrees["tp"]
            assert settings["batch_size"] == SLOTS
    assert {case.name for case in CASES} == {
        case.name for machines in MACHINES.values() for machine in machines for case in cases_on(machine)
    }


def test_only_the_same_tokens_are_right_and_an_end_only_where_it_is_known() -> None:
    plain, ending = CASES[0], next(case for case in CASES if case.ends)
    assert checked(plain, {"texts": [[1, 2], [3]]}, [[1, 2], [3]]) == ("3 of 3 tokens as transformers", True)
    assert checked(plain, {"texts": [[1, 2], [4]]}, [[1, 2], [3]]) == ("2 of 3 tokens as transformers", False)
    assert checked(plain, {"ends": "ValueError: no"}, [[1]]) == ("ValueError: no", False)
    assert checked(ending, {"ends": f"RuntimeError: {ending.ends}"}, [[1]])[1]
    assert not checked(ending, {"texts": [[1]]}, [[1]])[1], "it runs by now: say so"
