"""Properties of the time model that hold for all arrivals and cancellations."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from engine_agent.cell_proxy import rewrite
from engine_agent.engines.sim.batching import BatchingModel, ModelParameters, Sequence, Step
from engine_agent.engines.sim.prefix_cache import block_hashes
from engine_agent.protocol.states import ServingClass

parameters_of_models = st.builds(
    ModelParameters,
    prefill_tokens_per_s=st.floats(10, 1e5),
    decode_step_ms=st.floats(0.1, 100),
    decode_step_per_seq_ms=st.floats(0, 5),
    kv_capacity_tokens=st.just(200),
    max_num_seqs=st.integers(1, 6),
    prefill_chunk_tokens=st.integers(1, 80),
    prefix_block_tokens=st.integers(0, 20),
    batch_prompt_tokens=st.integers(0, 60),
    step_jitter=st.floats(0, 0.9),
    seed=st.integers(0, 9),
)
PRIORITIES = tuple(rewrite.PRIORITIES.values())
lengths = st.tuples(st.integers(1, 150), st.integers(0, 50), st.sampled_from(PRIORITIES))
arrivals = st.lists(st.tuples(st.integers(0, 30), lengths), max_size=25)
"""(before which step, (prompt tokens, output tokens, priority))"""
cancellations = st.dictionaries(st.integers(0, 24), st.integers(0, 60), max_size=8)
"""sequence -> during which step its client leaves"""


@dataclass
class Run:
    """Everything that happened until the model was idle and nothing more arrived."""

    submitted: dict[str, Sequence] = field(default_factory=dict)
    tokens: Counter[str] = field(default_factory=Counter)
    finished: list[str] = field(default_factory=list)
    cancelled: set[str] = field(default_factory=set)
    admitted: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)


def blocks_of(parameters: ModelParameters, prompt: int, output: int) -> tuple[int, ...]:
    """Prompts of equal length modulo 3 begin alike, so that blocks are shared, found again and evicted."""
    size = parameters.prefix_block_tokens
    return block_hashes((str(prompt % 3),) * (prompt + output), size)


def run_to_the_end(
    parameters: ModelParameters,
    arriving: list[tuple[int, tuple[int, int, int]]],
    leaving: dict[int, int],
) -> Run:
    model, run = BatchingModel(parameters), Run()
    now_s, last_arrival = 0.0, max((before for before, _ in arriving), default=0)
    # Every step moves at least one token, so this many are enough for all of them.
    for number in range(last_arrival + sum(prompt + output for _, (prompt, output, _) in arriving) + 2):
        for index, (before, (prompt, output, priority)) in enumerate(arriving):
            if before == number:
                run.submitted[str(index)] = Sequence(
                    str(index), prompt, output, priority, blocks_of(parameters, prompt, output)
                )
                model.submit(run.submitted[str(index)])
        step = model.begin_step(now_s)
        assert model.running <= parameters.max_num_seqs
        assert 0 <= model.kv_tokens <= model.kv_reserved_tokens
        assert model.kv_reserved_tokens + model.kv_kept_tokens <= parameters.kv_capacity_tokens
        if step is None:
            assert model.waiting == 0
            continue
        run.steps.append(step)
        run.admitted += step.admitted
        run.cancelled |= {str(who) for who, when in leaving.items() if when == number and model.cancel(str(who))}
        for token in model.finish_step():
            is_read_alone = run.submitted[token.sequence].output_tokens == 0
            assert token.index == (-1 if is_read_alone else run.tokens[token.sequence])
            run.tokens[token.sequence] += not is_read_alone
            run.finished += [token.sequence] if token.is_last else []
        assert 0 <= model.kv_tokens <= model.kv_reserved_tokens
        assert model.kv_reserved_tokens + model.kv_kept_tokens <= parameters.kv_capacity_tokens
        now_s = step.ends_at_s
    assert (model.running, model.waiting, model.kv_reserved_tokens) == (0, 0, 0)
    return run


@given(parameters_of_models, arrivals, cancellations)
def test_every_request_gets_exactly_its_tokens_or_was_cancelled(
    parameters: ModelParameters, arriving: list[tuple[int, tuple[int, int, int]]], leaving: dict[int, int]
) -> None:
    run = run_to_the_end(parameters, arriving, leaving)

    assert set(run.finished) == set(run.submitted) - run.cancelled
    assert all(run.tokens[name] == run.submitted[name].output_tokens for name in run.finished)
    assert all(run.tokens[name] < max(1, run.submitted[name].output_tokens) for name in run.cancelled)


@given(parameters_of_models, arrivals)
def test_requests_of_one_priority_are_admitted_in_the_order_they_came(
    parameters: ModelParameters, arriving: list[tuple[int, tuple[int, int, int]]]
) -> None:
    run = run_to_the_end(parameters, arriving, leaving={})

    came = list(run.submitted)
    for priority in PRIORITIES:
        expected = [name for name in came if run.submitted[name].priority == priority]
        first = dict.fromkeys(name for name in run.admitted if run.submitted[name].priority == priority)
        assert list(first) == expected


@given(parameters_of_models, arrivals)
def test_a_step_takes_time_and_reads_no_more_than_its_chunk(
    parameters: ModelParameters, arriving: list[tuple[int, tuple[int, int, int]]]
) -> None:
    run = run_to_the_end(parameters, arriving, leaving={})

    for step in run.steps:
        assert step.ends_at_s > step.starts_at_s
        assert sum(step.prefilled.values()) <= parameters.prefill_chunk_tokens
        assert step.prefilled or step.yielding


@given(parameters_of_models, arrivals)
def test_batch_prompts_have_their_share_of_a_step_and_batch_requests_rest_beside_an_urgent_prompt(
    parameters: ModelParameters, arriving: list[tuple[int, tuple[int, int, int]]]
) -> None:
    run = run_to_the_end(parameters, arriving, leaving={})

    def batch_of(names: Iterable[str]) -> list[str]:
        return [name for name in names if run.submitted[name].priority == rewrite.PRIORITIES[ServingClass.BATCH]]

    for step in run.steps if parameters.batch_prompt_tokens else ():
        batch = batch_of(step.prefilled)
        assert sum(step.prefilled[name] for name in batch) <= parameters.batch_prompt_tokens
        if len(batch) < len(step.prefilled):
            assert batch == batch_of(step.yielding) == []
