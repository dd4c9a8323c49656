"""The time model: examples, and properties that hold for all arrivals and cancellations."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_agent.cell_proxy.rewrite import PRIORITIES
from engine_agent.engines.sim.batching import BatchingModel, ModelParameters, Sequence, Step, TokenGiven, TooLong
from engine_agent.engines.sim.prefix_cache import block_hashes
from engine_agent.protocol.states import ServingClass

STEADY = ModelParameters(
    prefill_tokens_per_s=1000,
    decode_step_ms=10,
    decode_step_per_seq_ms=1,
    kv_capacity_tokens=1000,
    max_num_seqs=4,
    prefill_chunk_tokens=100,
    step_jitter=0,
)


def model_with(*sequences: Sequence, parameters: ModelParameters = STEADY) -> BatchingModel:
    model = BatchingModel(parameters)
    for sequence in sequences:
        model.submit(sequence)
    return model


def one_step(model: BatchingModel, now_s: float = 0.0) -> tuple[float, tuple[TokenGiven, ...]]:
    step = model.begin_step(now_s)
    assert step is not None
    return round(step.ends_at_s - now_s, 6), model.finish_step()


def test_an_idle_model_has_no_step() -> None:
    assert BatchingModel(STEADY).begin_step(0.0) is None


def test_a_request_gets_its_first_token_when_its_prompt_is_read() -> None:
    model = model_with(Sequence("a", prompt_tokens=50, output_tokens=2))

    assert one_step(model) == (0.061, (TokenGiven("a", 0, is_last=False),))
    assert one_step(model) == (0.011, (TokenGiven("a", 1, is_last=True),))
    assert model.begin_step(1.0) is None


def test_what_is_only_read_costs_its_prompt_and_leaves() -> None:
    model = model_with(
        Sequence("a", prompt_tokens=150, output_tokens=0), Sequence("b", prompt_tokens=1, output_tokens=2)
    )

    assert one_step(model) == (0.111, ())
    assert one_step(model) == (0.063, (TokenGiven("a", -1, is_last=True), TokenGiven("b", 0, is_last=False)))
    assert (model.running, model.kv_tokens, model.kv_reserved_tokens) == (1, 2, 3)


def test_a_long_prompt_is_read_in_chunks_while_others_decode() -> None:
    model = model_with(Sequence("short", prompt_tokens=1, output_tokens=9))
    one_step(model)
    model.submit(Sequence("long", prompt_tokens=250, output_tokens=1))

    steps = [one_step(model) for _ in range(4)]

    assert [duration_s for duration_s, _ in steps] == [0.112, 0.112, 0.062, 0.011]
    assert [[token.sequence for token in tokens] for _, tokens in steps] == [
        ["short"],
        ["short"],
        ["short", "long"],
        ["short"],
    ]


def test_a_step_takes_longer_with_every_sequence_in_it() -> None:
    model = model_with(*(Sequence(name, 1, 5) for name in "abc"))
    one_step(model)

    assert one_step(model)[0] == 0.013


def test_a_slow_factor_stretches_the_step() -> None:
    step = model_with(Sequence("a", 50, 2)).begin_step(7.0, slow_factor=3.0)

    assert step is not None
    assert round(step.ends_at_s, 6) == 7.183


def test_a_sequence_beyond_the_batch_size_waits() -> None:
    model = model_with(*(Sequence(name, 1, 2) for name in "abcde"))
    one_step(model)

    assert (model.running, model.waiting) == (4, 1)
    one_step(model)
    step = model.begin_step(1.0)
    assert step is not None
    assert tuple(step.admitted) == ("e",)


def test_a_request_waits_for_room_and_nobody_overtakes_it() -> None:
    model = model_with(Sequence("big", 600, 2), Sequence("too big now", 500, 1), Sequence("small", 1, 1))

    step = model.begin_step(0.0)

    assert step is not None
    assert tuple(step.admitted) == ("big",)
    assert model.waiting == 2


def test_a_lower_priority_number_goes_first_and_equals_keep_their_order() -> None:
    model = model_with(Sequence("batch", 1, 1, priority=5), Sequence("first", 1, 1), Sequence("second", 1, 1))

    step = model.begin_step(0.0)

    assert step is not None
    assert tuple(step.admitted) == ("first", "second", "batch")


BATCH = PRIORITIES[ServingClass.BATCH]


def test_an_urgent_prompt_overtakes_a_batch_prompt_that_is_being_read() -> None:
    model = model_with(Sequence("batch", 250, 1, BATCH), parameters=replace(STEADY, batch_prompt_tokens=40))
    read: list[dict[str, int]] = []
    for number in range(8):
        if number == 1:
            model.submit(Sequence("urgent", 150, 1))
        step = model.begin_step(0.0)
        assert step is not None
        read.append(dict(step.prefilled))
        model.finish_step()

    assert read[:3] == [{"batch": 40}, {"urgent": 87}, {"urgent": 63}], "seven eighths of 100, then the rest"
    assert read[3:] == [{"batch": 40}] * 5


def test_batch_answers_rest_while_an_urgent_prompt_is_read() -> None:
    model = model_with(Sequence("batch", 10, 5, BATCH), Sequence("answers", 10, 5))
    one_step(model)
    assert [token.sequence for token in one_step(model)[1]] == ["answers", "batch"]
    model.submit(Sequence("urgent", 150, 1))

    given = [[token.sequence for token in one_step(model)[1]] for _ in range(3)]

    assert given == [["answers"], ["answers", "urgent"], ["answers", "batch"]]


def test_without_the_rule_the_urgent_prompt_waits_for_the_rest_of_the_batch_prompt() -> None:
    model = model_with(Sequence("batch", 250, 1, BATCH), parameters=replace(STEADY, batch_prompt_tokens=0))
    one_step(model)
    model.submit(Sequence("urgent", 50, 1))

    read = []
    for _ in range(2):
        step = model.begin_step(0.0)
        assert step is not None
        read.append(dict(step.prefilled))
        model.finish_step()

    assert read == [{"batch": 100}, {"batch": 50, "urgent": 50}]


def test_batch_prompts_share_what_a_step_has_for_them_and_the_next_begins_where_one_ends() -> None:
    parameters = replace(STEADY, batch_prompt_tokens=40, max_num_seqs=3)
    model = model_with(*(Sequence(name, 60, 2, BATCH) for name in "abc"), parameters=parameters)

    first = model.begin_step(0.0)
    model.finish_step()
    second = model.begin_step(0.0)

    assert first is not None
    assert second is not None
    assert (dict(first.prefilled), tuple(first.admitted)) == ({"a": 40}, ("a",))
    assert (dict(second.prefilled), tuple(second.admitted)) == ({"a": 20, "b": 20}, ("b",))


def test_an_urgent_request_without_room_takes_that_of_the_last_batch_request_which_goes_on_later() -> None:
    parameters = replace(STEADY, max_num_seqs=2)
    model = model_with(*(Sequence(name, 20, 4, BATCH) for name in ("first", "last")), parameters=parameters)
    given: list[TokenGiven] = []
    for _ in range(2):
        given += one_step(model)[1]
    model.submit(Sequence("urgent", 10, 1))

    given += one_step(model)[1]
    assert (given[-1], model.running, model.waiting) == (TokenGiven("urgent", 0, is_last=True), 1, 1)
    while model.running or model.waiting:
        given += one_step(model)[1]

    assert [token.index for token in given if token.sequence == "last"] == [0, 1, 2, 3]
    assert model.kv_reserved_tokens == model.kv_tokens == 0


def test_a_cancelled_sequence_frees_its_memory_and_gets_no_token() -> None:
    model = model_with(Sequence("gone", 10, 5), Sequence("stays", 10, 5))
    model.begin_step(0.0)

    assert model.cancel("gone")
    assert not model.cancel("gone")

    assert [token.sequence for token in model.finish_step()] == ["stays"]
    assert model.kv_reserved_tokens == 15
    assert model.kv_tokens == 11


def test_a_cancelled_waiting_sequence_may_come_again() -> None:
    model = model_with(Sequence("a", 1, 1))

    assert model.cancel("a")
    model.submit(Sequence("a", 2, 1))

    assert [token.sequence for token in one_step(model)[1]] == ["a"]


def test_a_sequence_that_never_fits_is_refused() -> None:
    with pytest.raises(TooLong, match="exceed the KV cache of 1000 tokens"):
        model_with(Sequence("a", 990, 11))


@pytest.mark.parametrize("sequence", [Sequence("a", 0, 1), Sequence("a", 1, -1), Sequence("twice", 1, 1)])
def test_a_senseless_sequence_is_refused(sequence: Sequence) -> None:
    with pytest.raises(ValueError, match=sequence.id):
        model_with(Sequence("twice", 1, 1)).submit(sequence)


def test_steps_are_begun_and_finished_in_turn() -> None:
    model = model_with(Sequence("a", 1, 3))

    with pytest.raises(RuntimeError, match="no step was begun"):
        model.finish_step()
    model.begin_step(0.0)
    with pytest.raises(RuntimeError, match="not finished"):
        model.begin_step(1.0)


def test_the_same_seed_gives_the_same_times_and_another_seed_gives_others() -> None:
    def durations(seed: int) -> list[float]:
        jittery = ModelParameters(step_jitter=0.2, seed=seed)
        model = model_with(Sequence("a", 1, 9), parameters=jittery)
        return [one_step(model)[0] for _ in range(9)]

    assert durations(1) == durations(1)
    assert durations(1) != durations(2)


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
EACH_PRIORITY = tuple(PRIORITIES.values())
lengths = st.tuples(st.integers(1, 150), st.integers(0, 50), st.sampled_from(EACH_PRIORITY))
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
    for priority in EACH_PRIORITY:
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
        return [name for name in names if run.submitted[name].priority == PRIORITIES[ServingClass.BATCH]]

    for step in run.steps if parameters.batch_prompt_tokens else ():
        batch = batch_of(step.prefilled)
        assert sum(step.prefilled[name] for name in batch) <= parameters.batch_prompt_tokens
        if len(batch) < len(step.prefilled):
            assert batch == batch_of(step.yielding) == []
