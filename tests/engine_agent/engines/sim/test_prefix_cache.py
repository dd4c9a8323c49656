"""Prompts that begin as earlier ones: what is found, what is computed, and what is forgotten first."""

from engine_agent.engines.sim.batching import BatchingModel, ModelParameters, Sequence, Step
from engine_agent.engines.sim.prefix_cache import block_hashes

BLOCK = 10
CELL = ModelParameters(
    prefill_tokens_per_s=1000,
    decode_step_ms=10,
    decode_step_per_seq_ms=0,
    kv_capacity_tokens=200,
    max_num_seqs=4,
    prefill_chunk_tokens=1000,
    prefix_block_tokens=BLOCK,
    step_jitter=0,
)


def ask(name: str, prompt: str, *, answer: str = "", output_tokens: int = 1) -> Sequence:
    """A request whose tokens are the letters of its prompt and of its answer."""
    blocks = block_hashes(prompt + answer, BLOCK)
    return Sequence(name, len(prompt), max(output_tokens, len(answer)), blocks=blocks)


def begun(model: BatchingModel, sequence: Sequence) -> Step:
    model.submit(sequence)
    step = model.begin_step(0.0)
    assert step is not None
    return step


def run(model: BatchingModel, sequence: Sequence) -> Step:
    """Serve it alone, and return its first step."""
    first = begun(model, sequence)
    model.finish_step()
    while model.begin_step(0.0):
        model.finish_step()
    return first


def test_equal_hashes_mean_an_equal_beginning() -> None:
    one, other = block_hashes("a" * 10 + "b" * 10 + "rest", BLOCK), block_hashes("a" * 10 + "c" * 10 + "b" * 10, BLOCK)

    assert len(one) == 2
    assert one[0] == other[0]
    assert not {*one[1:]} & {*other[1:]}
    assert block_hashes("a" * 30, 0) == ()


def test_a_prompt_that_begins_as_an_earlier_one_is_read_from_where_it_differs() -> None:
    model = BatchingModel(CELL)
    run(model, ask("first", "a" * 40 + "b" * 10))

    step = begun(model, ask("second", "a" * 40 + "c" * 20))

    assert step.admitted == {"second": 40}
    assert step.prefilled == {"second": 20}
    assert round(step.ends_at_s, 6) == 0.03


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    model = BatchingModel(CELL)
    run(model, ask("first", "a" * 40))

    assert begun(model, ask("again", "a" * 40)).prefilled == {"again": 10}


def test_the_next_turn_of_a_conversation_finds_the_answer_too() -> None:
    model = BatchingModel(CELL)
    run(model, ask("first", "a" * 20, answer="b" * 20))

    assert begun(model, ask("second", "a" * 20 + "b" * 20 + "why")).admitted == {"second": 40}


def test_two_at_once_share_their_beginning_and_its_room() -> None:
    model = BatchingModel(CELL)
    model.submit(ask("first", "a" * 150, output_tokens=9))
    model.begin_step(0.0)
    model.finish_step()

    step = begun(model, ask("second", "a" * 150, output_tokens=9))

    assert step.admitted == {"second": 140}
    assert model.kv_reserved_tokens == 150 + 9 + 10 + 9


def test_what_is_not_computed_yet_is_not_found() -> None:
    model = BatchingModel(CELL)
    model.submit(ask("first", "a" * 50))

    assert begun(model, ask("second", "a" * 50)).admitted == {"first": 0, "second": 0}


def test_the_least_recently_used_is_forgotten_first_and_its_end_before_its_beginning() -> None:
    model = BatchingModel(CELL)
    run(model, ask("old", "a" * 80))
    run(model, ask("young", "b" * 80))

    run(model, ask("big", "c" * 60))

    assert begun(model, ask("young again", "b" * 80 + "x")).admitted == {"young again": 80}
    model.finish_step()
    assert begun(model, ask("old again", "a" * 80 + "x")).admitted == {"old again": 50}


def test_what_is_in_use_is_never_forgotten() -> None:
    model = BatchingModel(CELL)
    begun(model, ask("long", "a" * 100, output_tokens=50))
    model.finish_step()
    run_short = ask("short", "b" * 40)
    model.submit(run_short)
    model.begin_step(0.0)
    model.finish_step()

    step = begun(model, ask("same", "a" * 100))

    assert step.admitted == {"same": 90}


def test_a_sequence_that_left_leaves_what_it_computed() -> None:
    model = BatchingModel(CELL)
    begun(model, ask("gone", "a" * 40, output_tokens=50))
    model.finish_step()
    model.cancel("gone")

    assert (model.kv_reserved_tokens, model.kv_kept_tokens) == (0, 40)
    assert begun(model, ask("next", "a" * 40 + "b")).admitted == {"next": 40}


def test_without_blocks_nothing_is_found() -> None:
    model = BatchingModel(ModelParameters(prefix_block_tokens=0, step_jitter=0))
    run(model, Sequence("first", 50, 1))

    assert begun(model, Sequence("again", 50, 1)).admitted == {"again": 0}
