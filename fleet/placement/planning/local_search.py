"""Local search: moves nodes between drafts and spares, and places drafts again, while the total network distance
shrinks. It tries only places nearer to the rest of a cell than the node that it would give up. Its work is bounded, so
that it never delays a large fleet for small gains."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, combinations, permutations

from fleet.placement.planning.packing import (
    CellsByDomain,
    Choice,
    Draft,
    Parts,
    SpareGroup,
    TopologyTree,
    fill,
    grow,
    height_between,
    pack,
)

MAX_EXCHANGES = 12_000
"""Limit of the work: about 0.3 s on one core of 2024."""
MAX_OWNERS = 24
"""Drafts per network node that are tried for an exchange, so that wide groups are not quadratic."""
MAX_LEAVES = 32
"""With at most this many lowest groups, all are tried as places of a draft."""
MAX_DRAFTS_BY_TWO = 6
"""With at most this many drafts, one is placed again together with two others."""


class _Search:
    def __init__(self, drafts: Sequence[Draft]) -> None:
        self.owners: dict[SpareGroup, dict[Draft, None]] = defaultdict(dict)
        self.placed = drafts
        self.left = MAX_EXCHANGES
        for draft in drafts:
            for leaf in draft.parts:
                self._add(draft, leaf)

    def give_to(self, draft: Draft, gone: SpareGroup, got: SpareGroup) -> None:
        """Records that a draft has one node less of one lowest group and one more of another."""
        draft.distance += reach(draft, got) - height_between(gone, got) - reach(draft, gone)
        draft.parts[gone] -= 1
        draft.parts[got] += 1
        self._add(draft, got)
        if not draft.parts[gone]:
            del draft.parts[gone]
            for group in _group_and_parents(gone):
                self.owners[group].pop(draft, None)
            for leaf in draft.parts:
                self._add(draft, leaf)

    def lift(self, draft: Draft) -> None:
        for leaf, count in draft.parts.items():
            leaf.take(-count)
            for group in _group_and_parents(leaf):
                self.owners[group].pop(draft, None)
        draft.parts, draft.distance = Counter(), 0

    def set_down(self, draft: Draft, parts: Counter[SpareGroup], distance: int) -> None:
        """Assigns places to a draft that was lifted."""
        draft.parts, draft.distance = Counter(parts), distance
        for leaf, count in parts.items():
            leaf.take(count)
            self._add(draft, leaf)

    def _add(self, draft: Draft, leaf: SpareGroup) -> None:
        for group in _group_and_parents(leaf):
            self.owners[group][draft] = None


def pack_shortest(tree: TopologyTree, drafts: Sequence[Draft], load: CellsByDomain) -> None:
    """Packs and improves. A small fleet with cells of several sizes is packed in both orders; the shorter result
    stays."""
    pack(tree, drafts, load)
    improve(tree, drafts)
    if len({draft.count for draft in drafts}) == 1 or len(tree.leaves) > MAX_LEAVES:
        return
    first = [(draft, draft.parts, draft.distance) for draft in drafts]
    cost = _cost(drafts)
    search = _Search(drafts)
    for draft in drafts:
        search.lift(draft)
    pack(tree, drafts, load, large_first=False)
    improve(tree, drafts)
    if _cost(drafts) >= cost:
        for draft in drafts:
            search.lift(draft)
        for draft, parts, total in first:
            search.set_down(draft, parts, total)


def _cost(drafts: Sequence[Draft]) -> tuple[int, int]:
    return sum(not draft.parts for draft in drafts), sum(draft.distance for draft in drafts)


def improve(tree: TopologyTree, drafts: Iterable[Draft]) -> None:
    """Reduces the total distance of placed drafts until there is no gain or the limit is reached."""
    placed = [draft for draft in drafts if draft.parts]
    search = _Search(placed)
    waiting = {draft: None for draft in placed if draft.distance}
    while waiting and search.left > 0:
        draft = next(iter(waiting))
        del waiting[draft]
        changed = _exchange(search, draft) or _reinsert(search, tree, draft)
        waiting |= {other: None for other in changed if other.distance}


def _exchange(search: _Search, draft: Draft) -> list[Draft]:
    """Makes the best exchange of this draft, if one helps. Returns the changed drafts."""
    best: tuple[int, SpareGroup, SpareGroup, Draft | None] | None = None
    for gone in list(draft.parts):
        for got, other in _offers(search, draft, gone):
            search.left -= 1
            gain = _gain(draft, gone, got, other)
            if gain > (best[0] if best else 0) and _allowed(draft, gone, got, other):
                best = gain, gone, got, other
    if best is None:
        return []
    _, gone, got, other = best
    search.give_to(draft, gone, got)
    if other is None:
        got.take(1)
        gone.take(-1)
        return [draft]
    search.give_to(other, got, gone)
    return [draft, other]


def _reinsert(search: _Search, tree: TopologyTree, draft: Draft) -> list[Draft]:
    """Lifts this draft with one neighbour (two in a small fleet), and places all again. Helps between cells of
    different sizes, and where a whole cell should move."""
    neighbours = _neighbours(search, tree, draft)
    at_once = 2 if len(search.placed) <= MAX_DRAFTS_BY_TWO else 1
    for others in chain.from_iterable(combinations(neighbours, number) for number in range(at_once + 1)):
        lifted = (draft, *others)
        was = [(one, one.parts, one.distance) for one in lifted]
        anchors = _anchors(tree, lifted)
        for one in lifted:
            search.lift(one)
        for order in permutations(lifted):
            if _grow_all(search, order, anchors, sum(distance for _, _, distance in was)):
                return list(lifted)
        for one, parts, distance in was:
            search.set_down(one, parts, distance)
    return []


def _grow_all(search: _Search, order: Sequence[Draft], anchors: Sequence[SpareGroup], below: int) -> bool:
    """Places drafts with a total distance below `below`, trying every place for all but the last."""
    draft, rest = order[0], order[1:]
    choices = _choices(search, draft, anchors)
    for choice in choices if rest else choices[:1]:
        if choice.distance >= below:
            return False
        search.set_down(draft, Counter(dict(choice.parts)), choice.distance)
        if not rest or _grow_all(search, rest, anchors, below - choice.distance):
            return True
        search.lift(draft)
    return False


def _choices(search: _Search, draft: Draft, anchors: Sequence[SpareGroup]) -> list[Choice]:
    """Places for a draft around these groups, the nearest first."""
    choices: dict[Parts, Choice] = {}
    for leaf in anchors:
        for skip in range(min(1, draft.ceiling), draft.ceiling + 1):
            search.left -= 1
            choice = grow(leaf, draft.count, draft.ceiling, skip)
            if choice:
                choices.setdefault(choice.parts, choice)
    return sorted(choices.values(), key=lambda choice: (choice.distance, choice.leftover))


def _anchors(tree: TopologyTree, drafts: Iterable[Draft]) -> list[SpareGroup]:
    """Lowest groups to grow drafts around: all in a small fleet, otherwise their own."""
    if len(tree.leaves) <= MAX_LEAVES:
        return tree.leaves
    return list(dict.fromkeys(leaf for draft in drafts for leaf in draft.parts))


def _neighbours(search: _Search, tree: TopologyTree, draft: Draft) -> list[Draft]:
    """Other drafts near this one, the nearest first; all in a small fleet."""
    near: dict[Draft, None] = {}
    for height in range(tree.height):
        for leaf in draft.parts:
            near |= dict.fromkeys(search.owners[_group_and_parents(leaf)[height]])
    if len(tree.leaves) <= MAX_LEAVES:
        near |= dict.fromkeys(search.placed)
    near.pop(draft, None)
    return list(near)[:MAX_OWNERS]


def _offers(search: _Search, draft: Draft, gone: SpareGroup) -> Iterator[tuple[SpareGroup, Draft | None]]:
    """Replacements for a node of `gone`: places nearer to the rest of the draft, free or of another draft."""
    seen: set[SpareGroup] = set()
    for part in [leaf for leaf in draft.parts if leaf is not gone]:
        for group in _group_and_parents(part)[: height_between(part, gone)]:
            if group in seen:
                continue
            seen.add(group)
            if group.free:
                yield fill(group, 1)[0][0][0], None
            for other in list(search.owners[group])[:MAX_OWNERS]:
                if other is not draft:
                    yield from (
                        (leaf, other) for leaf in list(other.parts) if leaf is not gone and _is_below(leaf, group)
                    )


def _gain(draft: Draft, gone: SpareGroup, got: SpareGroup, other: Draft | None) -> int:
    apart = height_between(gone, got)
    gain = reach(draft, gone) - reach(draft, got) + apart
    return gain if other is None else gain + reach(other, got) - reach(other, gone) + apart


def _allowed(draft: Draft, gone: SpareGroup, got: SpareGroup, other: Draft | None) -> bool:
    return _fits(draft, gone, got) and (other is None or _fits(other, got, gone))


def _fits(draft: Draft, gone: SpareGroup, got: SpareGroup) -> bool:
    rest = (leaf for leaf, count in draft.parts.items() if count > (leaf is gone))
    return all(height_between(leaf, got) <= draft.ceiling for leaf in rest)


def reach(draft: Draft, leaf: SpareGroup) -> int:
    """Sum of the distances from a place to all nodes of a draft."""
    return sum(count * height_between(part, leaf) for part, count in draft.parts.items())


def _group_and_parents(leaf: SpareGroup) -> list[SpareGroup]:
    """A lowest group and the groups above it, without the root."""
    groups = []
    group: SpareGroup | None = leaf
    while group is not None and group.parent is not None:
        groups.append(group)
        group = group.parent
    return groups


def _is_below(leaf: SpareGroup, group: SpareGroup) -> bool:
    return leaf.path[: len(group.path)] == group.path
