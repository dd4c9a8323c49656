"""The order of classes in a step, by example; and in a real vLLM, whose answers do not change."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine_agent.cell_proxy.rewrite import PRIORITIES
from engine_agent.engines.vllm.class_scheduler import RunningRequest, StepOrder, plan_step, tokens_from
from engine_agent.protocol.messages import Artifact
from engine_agent.protocol.states import ServingClass
from tests.asking import CLIENT
from tests.engine_agent.engines.vllm.forks import Begin
from tests.engine_agent.engines.vllm.running_cell import (
    ANSWER_LIMIT_S,
    PROMPTS,
    TEXT,
    TOKENS,
    RunningCell,
    plan_of,
    running_cell,
)

URGENT, SOON, BATCH = (
    PRIORITIES[each] for each in (ServingClass.REALTIME, ServingClass.NEAR_REALTIME, ServingClass.BATCH)
)
READING, ANSWERING = True, False
PLACES = 4
LONG_TOKENS = 1600
"""Of a batch prompt; at 16 per step that is 100 steps, during which several short requests finish."""


def running(*requests: tuple[str, int, bool, int]) -> list[RunningRequest]:
    return [RunningRequest(*request) for request in requests]


@pytest.mark.parametrize(
    ("requests", "urgent_waits", "planned"),
    [
        ((), False, StepOrder((), most_tokens=256)),
        (
            (("b1", BATCH, READING, 900), ("u1", URGENT, ANSWERING, 1), ("b2", BATCH, ANSWERING, 5)),
            False,
            StepOrder(("u1", "b2", "b1"), most_tokens=262),
        ),
        (
            (("b1", BATCH, READING, 900), ("u1", URGENT, READING, 70), ("b2", BATCH, ANSWERING, 1)),
            False,
            StepOrder(("u1", "b2", "b1"), set_aside=frozenset({"b1", "b2"}), holds_waiting=True, most_tokens=1792),
        ),
        (
            (("b1", BATCH, READING, 900), ("s1", SOON, READING, 70), ("u1", URGENT, ANSWERING, 1)),
            False,
            StepOrder(("u1", "s1", "b1"), set_aside=frozenset({"b1"}), holds_waiting=True, most_tokens=1792),
        ),
        (
            (("u1", URGENT, READING, 70), ("u2", URGENT, ANSWERING, 1)),
            False,
            StepOrder(("u2", "u1"), holds_waiting=True, most_tokens=2048),
        ),
        (
            (("b1", BATCH, READING, 900), ("b2", BATCH, ANSWERING, 1)),
            True,
            StepOrder(("b2", "b1"), set_aside=frozenset({"b1", "b2"}), holds_waiting=True, most_tokens=1792),
        ),
    ],
)
def test_the_urgent_go_first_and_batch_prompts_have_what_is_left_of_their_share(
    requests: tuple[tuple[str, int, bool, int], ...], urgent_waits: bool, planned: StepOrder
) -> None:
    assert plan_step(running(*requests), urgent_waits=urgent_waits, limit=256, step_tokens=2048) == planned


def test_a_core_takes_the_launchers_word() -> None:
    assert (tokens_from({}), tokens_from({"SWITCHYARD_BATCH_PROMPT_TOKENS": "32"})) == (256, 32)


@pytest.fixture(scope="module")
def ordered(small: Artifact, forked: Begin, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCell]:
    plan = plan_of(
        small, max_num_seqs=PLACES, scheduling_policy="priority", batch_prompt_tokens=16, enable_prefix_caching=False
    )
    with running_cell(plan, tmp_path_factory.mktemp("ordered") / "logs", nodes=1, begin=forked) as engine:
        yield engine


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.timeout(1800)
def test_greedy_texts_are_those_of_vllms_own_scheduler_whatever_the_class(
    ordered: RunningCell, texts: dict[str, str]
) -> None:
    """Batch answers pause while urgent prompts are read, and continue afterwards."""

    def text_of(number: int) -> str:
        prompt, priority = PROMPTS[number], (URGENT, BATCH)[number % 2]
        return str(ordered.complete(prompt=prompt, max_tokens=TOKENS, priority=priority)["text"])

    with ThreadPoolExecutor(len(PROMPTS)) as clients:
        found = list(clients.map(text_of, range(len(PROMPTS))))

    assert found == [texts[prompt] for prompt in PROMPTS]


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.timeout(1800)
def test_urgent_requests_take_the_places_of_batch_requests_which_are_answered_all_the_same(
    ordered: RunningCell, texts: dict[str, str]
) -> None:
    preempted = ordered.metric("vllm:num_preemptions_total")

    def text_of(number: int) -> str:
        prompt, priority = PROMPTS[number], BATCH if number >= len(PROMPTS) // 2 else URGENT
        if priority == URGENT:
            ordered.wait_until(lambda: ordered.metric("vllm:num_requests_running") == PLACES, ANSWER_LIMIT_S)
        tokens = TOKENS if priority == URGENT else 16 * TOKENS
        return str(ordered.complete(prompt=prompt, max_tokens=tokens, priority=priority)["text"])

    with ThreadPoolExecutor(len(PROMPTS)) as clients:
        found = list(clients.map(text_of, range(len(PROMPTS))))

    assert all(text.startswith(texts[prompt]) for text, prompt in zip(found, PROMPTS, strict=True))
    assert ordered.metric("vllm:num_preemptions_total") > preempted


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.timeout(1800)
def test_urgent_requests_end_while_a_long_batch_prompt_is_read(ordered: RunningCell) -> None:
    """Counted, not timed: with vLLM's order the prompt is read in one step, before the second of them."""

    def batch() -> str:
        prompt = (TEXT * 100).split()[:LONG_TOKENS]
        body = {"model": "smollm2", "prompt": " ".join(prompt), "max_tokens": 1, "temperature": 0, "priority": BATCH}
        with CLIENT.stream(
            "POST", f"{ordered.url}/v1/completions", json={**body, "stream": True}, timeout=ANSWER_LIMIT_S
        ) as answer:
            events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
        return str(events[0]["choices"][0]["text"])

    with ThreadPoolExecutor(1) as client:
        long = client.submit(batch)
        urgent = 0
        while not long.done() and urgent < 5:
            ordered.complete(prompt="The capital of France is", max_tokens=2, priority=URGENT)
            urgent += 1
        assert not long.done(), "the batch prompt was read before five urgent requests were answered"
        assert long.result(ANSWER_LIMIT_S)
