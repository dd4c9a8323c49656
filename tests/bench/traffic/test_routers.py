"""The rules that the bench compares: who gets a request, and who waits."""

from hypothesis import given
from hypothesis import strategies as st

from bench.traffic.routers import (
    BoundedHash,
    CellLoad,
    Exact,
    LeastOutstanding,
    RandomCell,
    RoundRobin,
    Sticky,
    TwoChoices,
)


def loads(*in_flight: int, most: int = 4) -> list[CellLoad]:
    return [CellLoad(count, most) for count in in_flight]


def test_round_robin_takes_cells_in_turn_whatever_their_load() -> None:
    router = RoundRobin()

    assert [router.choose("", loads(4, 0, 4)) for _ in range(4)] == [1, 2, 0, 1]


def test_the_better_of_two_is_the_less_loaded() -> None:
    assert RandomCell(of=2).choose("", loads(3, 1)) == 1


def test_least_outstanding_takes_the_emptiest_and_equals_in_turn() -> None:
    router = LeastOutstanding(with_queue=True)

    assert router.choose("", loads(2, 1, 2)) == 1
    assert {router.choose("", loads(1, 1, 1)) for _ in range(3)} == {0, 1, 2}


def test_with_a_queue_a_request_waits_while_all_cells_are_full() -> None:
    assert LeastOutstanding(with_queue=True).choose("", loads(4, 4)) is None
    assert LeastOutstanding(with_queue=False).choose("", loads(4, 4)) is not None


def test_a_key_stays_with_its_cell_while_that_is_not_overloaded() -> None:
    router = BoundedHash(1.25)
    home = router.choose("conversation", loads(0, 0, 0, 0))
    assert home is not None
    busy = [0, 0, 0, 0]
    busy[home] = 3

    assert router.choose("conversation", loads(1, 1, 1, 1)) == home
    assert router.choose("conversation", loads(*busy)) != home
    assert BoundedHash(1.25, light_share=1.0).choose("conversation", loads(*busy)) == home


def test_a_full_cell_is_passed_over_unless_each_has_its_own_queue() -> None:
    home = BoundedHash(0).choose("conversation", loads(0, 0))
    assert home is not None
    full = [0, 0]
    full[home] = 4

    assert BoundedHash(0).choose("conversation", loads(*full)) == 1 - home
    assert BoundedHash(0).choose("conversation", loads(4, 4)) is None
    assert BoundedHash(0, own_queues=True).choose("conversation", loads(*full)) == home


def test_a_key_with_two_homes_goes_to_the_less_loaded_of_them() -> None:
    router = TwoChoices()

    chosen = [router.choose("conversation", loads(*(int(cell == busy) for cell in range(4)))) for busy in range(4)]

    assert len(set(chosen)) == 2
    assert router.choose("conversation", loads(4, 4, 4, 4)) is None


def test_a_new_key_goes_to_the_least_loaded_cell_and_stays_there_while_that_has_a_place() -> None:
    router = Sticky(0)

    assert router.choose("conversation", loads(3, 2, 3)) == 1
    assert router.choose("conversation", loads(0, 3, 0)) == 1
    assert router.choose("conversation", loads(0, 4, 1)) == 0
    assert router.choose("conversation", loads(3, 0, 1)) == 0
    assert Sticky(1.25).choose("another", loads(4, 4)) is None


def test_a_cell_that_has_more_of_a_prompt_gets_it_unless_it_is_overloaded() -> None:
    def cells(*found: int, busy: int = 0) -> list[CellLoad]:
        return [CellLoad(busy if at == 1 else 2, 16, 0, tokens) for at, tokens in enumerate(found)]

    router = Exact(1.25)

    assert router.choose("a", cells(0, 4096, 0)) == 1
    assert router.choose("a", cells(512, 512, 512)) == 1, "of equals the one that it had last"
    assert router.choose("b", cells(0, 4096, 512)) == 1
    assert router.choose("c", cells(0, 4096, 512, busy=9)) == 2, "it has more than its share"
    assert router.choose("d", cells(0, 4096, 0, busy=16)) in {0, 2}


@given(st.lists(st.integers(0, 8), min_size=2, max_size=8), st.text(max_size=8), st.sampled_from([1.1, 1.25, 2.0]))
def test_nobody_gets_more_than_the_bound_allows(in_flight: list[int], key: str, bound: float) -> None:
    chosen = BoundedHash(bound, own_queues=True).choose(key, loads(*in_flight, most=100))

    assert chosen is not None
    assert in_flight[chosen] + 1 < bound * (sum(in_flight) + 1) / len(in_flight) + 1
