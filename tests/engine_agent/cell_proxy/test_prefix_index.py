"""The index of cached beginnings, from the events of an engine and its computed requests."""

from hypothesis import given
from hypothesis import strategies as st

from engine_agent.cell_proxy.prefix_index import PrefixIndex, RequestPrefixes, read_prefixes
from engine_agent.engines.usage_ledger import CacheLog
from engine_agent.protocol.proxy_messages import (
    PREFIX_BYTES,
    BlockEvent,
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    PrefixChanges,
)

TOKENS = 4


class Cell:
    """An engine's log and the index that follows it."""

    def __init__(self, **limits: int) -> None:
        self.log = CacheLog(TOKENS)
        self.index = PrefixIndex(**limits)
        self.tell()

    def tell(self, *events: BlockEvent) -> None:
        self.log.add(events)
        self.index.apply(self.log.after(*self.index.known_upto))

    def compute(self, name: str, prefixes: tuple[int, ...], blocks: tuple[int, ...], *, parent: int = 0) -> None:
        """A request whose text is ten bytes a block, with a prefix every ten bytes; `blocks` are new."""
        ends = tuple(10 * (at + 1) for at in range(len(prefixes)))
        self.index.begin(name, RequestPrefixes(prefixes, ends, ends[-1]))
        self.index.count(name, TOKENS * len(prefixes))
        self.tell(BlocksStored(parent, blocks, name))
        self.index.end(name)

    @property
    def listed(self) -> set[int]:
        return numbers(self.index.after("", 0).added)


def numbers(packed: bytes) -> set[int]:
    return {int.from_bytes(packed[at : at + PREFIX_BYTES]) for at in range(0, len(packed), PREFIX_BYTES)}


def test_a_request_that_was_computed_shows_what_its_beginnings_are_made_of() -> None:
    cell = Cell()
    cell.compute("a", (11, 12, 13), (1, 2, 3))
    assert cell.listed == {11, 12, 13}
    cell.tell(BlocksRemoved((3,)))
    assert cell.listed == {11, 12}
    cell.tell(BlocksStored(2, (3,)))
    assert cell.listed == {11, 12, 13}, "stored again, for somebody else"
    cell.tell(CacheCleared())
    assert cell.listed == set()


def test_what_was_found_in_the_cache_belongs_to_the_request_too() -> None:
    cell = Cell()
    cell.compute("a", (11, 12), (1, 2))
    cell.compute("b", (11, 12, 23, 24), (5, 6), parent=2)
    assert cell.listed == {11, 12, 23, 24}
    cell.tell(BlocksRemoved((5,)))
    assert 23 not in cell.listed


def test_the_order_of_events_and_counts_does_not_matter() -> None:
    early, late = Cell(), Cell()
    request = RequestPrefixes((11, 12), (10, 20), 20)
    for cell in (early, late):
        cell.index.begin("a", request)
    early.tell(BlocksStored(0, (1, 2), "a"))
    early.index.count("a", 8)
    late.index.count("a", 8)
    late.index.end("a")
    late.tell(BlocksStored(0, (1,), "a"))
    late.tell(BlocksStored(1, (2,), "a"))
    assert early.listed == late.listed == {11, 12}


def test_a_prompt_that_is_half_read_lists_half() -> None:
    cell = Cell()
    cell.index.begin("a", RequestPrefixes((11, 12), (10, 20), 20))
    cell.index.count("a", 8)
    cell.tell(BlocksStored(0, (1,), "a"))
    assert cell.listed == {11}


def test_two_requests_that_part_correct_what_proportion_said() -> None:
    """The first half of the text has few tokens: its beginning was estimated at two blocks, and has one."""
    cell = Cell()
    cell.index.begin("a", RequestPrefixes((11, 12), (20, 40), 40))
    cell.index.count("a", 16)
    cell.tell(BlocksStored(0, (1, 2, 3, 4), "a"))
    cell.index.begin("b", RequestPrefixes((11, 22), (20, 40), 40))
    cell.index.count("b", 16)
    cell.tell(BlocksStored(1, (5, 6, 7), "b"))
    cell.tell(BlocksRemoved((2,)))
    assert 11 in cell.listed, "it is block 1, which both have"
    cell.tell(BlocksRemoved((1,)))
    assert 11 not in cell.listed


def test_blocks_whose_beginning_is_not_known_bind_nothing() -> None:
    cell = Cell()
    cell.index.begin("a", RequestPrefixes((11,), (10,), 10))
    cell.index.count("a", 4)
    cell.tell(BlocksStored(99, (1,), "a"))
    assert cell.listed == set()


def test_an_engine_that_is_another_starts_from_nothing() -> None:
    cell = Cell()
    cell.compute("a", (11,), (1,))
    known = cell.index.after("", 0)
    cell.log = CacheLog(TOKENS)
    cell.tell()
    news = cell.index.after(known.life, known.upto)
    assert numbers(news.removed) == {11}
    cell.index.lose()
    assert not cell.index.after("", 0).is_known


def test_prefixes_are_bounded_and_those_used_last_stay() -> None:
    cell = Cell(most_prefixes=2)
    cell.compute("a", (11,), (1,))
    cell.compute("b", (12,), (2,))
    cell.index.begin("again", RequestPrefixes((11,), (10,), 10))
    cell.compute("c", (13,), (3,))
    assert cell.listed == {11, 13}


def test_the_end_of_a_text_is_forgotten_before_its_beginning() -> None:
    cell = Cell(most_prefixes=4)
    cell.compute("a", (11, 12, 13), (1, 2, 3))
    cell.compute("b", (21, 22), (4, 5))
    assert cell.listed == {11, 12, 21, 22}
    cell.index.begin("again", RequestPrefixes((11, 12), (10, 20), 20))
    cell.compute("c", (31,), (6,))
    assert cell.listed == {11, 12, 21, 31}


def test_a_beginning_that_is_shorter_than_a_block_is_there_with_it() -> None:
    cell = Cell()
    cell.index.begin("a", RequestPrefixes((11, 12, 13, 14), (5, 10, 15, 20), 20))
    cell.index.count("a", 2 * TOKENS)
    cell.tell(BlocksStored(0, (1,), "a"))
    assert cell.listed == {11, 12, 13}
    cell.tell(BlocksStored(1, (2,), "a"))
    assert cell.listed == {11, 12, 13, 14}


@given(st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(1, 30), min_size=1, max_size=4)), max_size=40))
def test_a_reader_of_changes_ends_with_what_a_reader_of_all_has(steps: list[tuple[int, list[int]]]) -> None:
    cell = Cell()
    known, life, upto = set[int](), "", 0

    def read(changes: PrefixChanges) -> None:
        nonlocal life, upto
        known.difference_update(known if changes.is_whole else numbers(changes.removed))
        known.update(numbers(changes.added))
        life, upto = changes.life, changes.upto

    for number, (kind, blocks) in enumerate(steps):
        if kind == 0:
            cell.tell(BlocksRemoved(tuple(blocks)))
        elif kind == 1:
            read(cell.index.after(life, upto))
        else:
            cell.compute(f"r{number}", tuple(100 + block for block in blocks), tuple(blocks))
    read(cell.index.after(life, upto))
    assert known == cell.listed
    assert all(prefix - 100 in cell.index.blocks for prefix in known) or len(known) < 31


def test_a_header_that_is_none_names_nothing() -> None:
    whole = b"1000:256,512:" + b"0123456789ab" * 2
    assert read_prefixes(whole) == RequestPrefixes((0x0123456789AB,) * 2, (256, 512), 1000)
    for wrong in (
        b"",
        b"1000",
        b"1000:256:" + b"0" * 24,
        b"1000:512,256:" + b"0" * 24,
        b"1000:256,256:" + b"0" * 24,
        b"100:256,512:" + b"0" * 24,
        b"1000:256,512:" + b"0" * 23,
        b"1000:,:" + b"0" * 24,
        b"1000:" + b",".join(b"%d" % end for end in range(1, 82)) + b":" + b"0" * 12 * 81,
    ):
        assert read_prefixes(wrong) is None, wrong
