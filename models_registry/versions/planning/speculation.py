"""Builds and checks Medusa trees, and reads the field `speculation` of a version; engine arguments are rendered
elsewhere. A Medusa tree lists the paths of guesses that a decode step verifies together. The path [0, 2] is the first
head's best guess followed by the second head's third best. Head `i` guesses the token at distance `i + 1` from the
step's own token, the root, which is not listed. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from heapq import heapify, heappop, heappush
from itertools import islice
from math import isfinite
from typing import Any

from engine_agent.protocol.manifest import BadArtifact
from engine_agent.protocol.messages import Artifact
from models_registry.artifacts.planner import parse_place
from models_registry.versions.planning.spec import FieldReader, InvalidVersion

Path = tuple[int, ...]
Accuracies = tuple[tuple[float, ...], ...]
"""By head, then by rank: the share of calibration tokens for which this guess was right."""

PROBABILITY_SLACK = 1e-9
"""Rounding tolerance: the shares of one head may sum to this much above 1."""


class BadTree(ValueError):
    """Not a tree that a decoder can use; the text names the error and the expected form."""


@dataclass(frozen=True, slots=True)
class MedusaTree:
    """The tree in the form of `medusa_tree`, and the expected number of tokens beyond the step's own."""

    paths: tuple[Path, ...]
    expected_accepted: float

    def as_json(self) -> list[list[int]]:
        """`[[0], [0, 0], …]`, every path after its prefix."""
        return [list(path) for path in self.paths]


def build_tree(accuracies: Accuracies, *, size: int, depth: int) -> MedusaTree:
    """The tree of at most `size` paths, none longer than `depth`, with the longest expected accepted length.

    Let p(path) be the probability that every guess on a path is right. Guesses of one head at one place exclude each
    other, so at most one path of each length is right. The accepted length is the length of the longest right path;
    since a tree contains all prefixes of its paths, that is the number of its right paths, and its expectation is the
    sum of p over the tree. With independent heads, p(path) is the product of the accuracies along it.

    The greedy choice, always the most probable path whose prefix is in the tree, maximises that sum. Proof: an accuracy
    is at most 1, so p(path) <= p(prefix). Suppose that a path q was left out although p(q) > p(r) for a chosen r. When
    r was chosen, let q' be the first prefix of q (or q itself) outside the tree. The prefix of q' was inside, so q'
    could have been chosen, and p(q') >= p(q) > p(r), against the greedy choice. So the `size` chosen paths are the most
    probable of *all* paths, and no `size` paths, closed under prefixes or not, have a larger sum.

    Ties go to the shorter path, then to the lower guesses, so one input has one tree. Paths of probability 0 are left
    out: they cost time in every step and are never accepted.

    `accuracies`: of each head, best guess first. `size`: paths per step; the decoder verifies one token more, its own.
    `depth`: longest path, at most the number of heads. Raises BadTree if the accuracies are not probabilities, or size
    or depth is impossible."""
    _check_accuracies(accuracies)
    if size < 1:
        raise BadTree(f"size is {size}; it must be a whole number from 1")
    if not 1 <= depth <= len(accuracies):
        raise BadTree(f"depth is {depth}; it must be from 1 to the number of heads, {len(accuracies)}")
    paths, probabilities = [], []
    for probability, path in islice(_most_probable_first(accuracies, depth), size):
        paths.append(path)
        probabilities.append(probability)
    return MedusaTree(tuple(paths), sum(probabilities, start=0.0))


def _most_probable_first(accuracies: Accuracies, depth: int) -> Iterator[tuple[float, Path]]:
    """Every path that can be right, after its prefix, with its probability."""
    frontier: list[tuple[float, int, Path]] = [
        (-share, 1, (rank,)) for rank, share in enumerate(accuracies[0]) if share > 0
    ]
    heapify(frontier)
    while frontier:
        cost, length, path = heappop(frontier)
        yield -cost, path
        if length < depth:
            for rank, share in enumerate(accuracies[length]):
                if share > 0 and cost * share < 0:
                    heappush(frontier, (cost * share, length + 1, (*path, rank)))


def check_tree(tree: Any, *, heads: int, top_k: int | None = None) -> tuple[Path, ...]:
    """Check a tree from outside, a list of lists of whole numbers from 0; returns its paths, each after its prefix.
    `heads`: number of Medusa heads, the length limit of paths. `top_k`: guesses per head; None: no limit. Raises
    BadTree if it is not such a list, or a path is a duplicate or too long, has too high a guess or lacks its prefix."""
    if not isinstance(tree, list | tuple) or not tree:
        raise BadTree(f"the tree is {str(tree)[:40]!r}; it must be a list of paths such as [[0], [0, 0], [1]]")
    paths = [_path(entry) for entry in tree]
    known = set(paths)
    if len(known) < len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise BadTree(f"path {list(twice)} occurs twice; paths must be unique")
    for path in paths:
        if len(path) > heads:
            raise BadTree(f"path {list(path)} has {len(path)} guesses, but there are {heads} heads")
        if top_k is not None and max(path) >= top_k:
            raise BadTree(f"path {list(path)} has guess {max(path)}, but guesses go from 0 to {top_k - 1}")
        if len(path) > 1 and path[:-1] not in known:
            raise BadTree(f"path {list(path)} lacks its prefix {list(path[:-1])}; add the prefix or drop the path")
    return tuple(sorted(paths, key=lambda path: (len(path), path)))


def expected_accepted(paths: Iterable[Path], accuracies: Accuracies) -> float:
    """Expected tokens beyond the step's own, for a checked tree: the sum of its paths' probabilities."""
    return sum((_probability(path, accuracies) for path in paths), start=0.0)


def _probability(path: Path, accuracies: Accuracies) -> float:
    product = 1.0
    for head, rank in enumerate(path):
        product *= accuracies[head][rank] if rank < len(accuracies[head]) else 0.0
    return product


def _path(entry: Any) -> Path:
    whole = isinstance(entry, list | tuple) and all(
        isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0 for rank in entry
    )
    if not whole or not entry:
        raise BadTree(f"path {entry!r} must be a list of whole numbers from 0, with at least one")
    return tuple(entry)


def _check_accuracies(accuracies: Sequence[Sequence[float]]) -> None:
    if not accuracies:
        raise BadTree("there are no accuracies; give a list of shares for each head")
    for head, shares in enumerate(accuracies):
        if not shares:
            raise BadTree(f"head {head} has no accuracies; give the share of each of its guesses, best first")
        for rank, share in enumerate(shares):
            if not isfinite(share) or not 0 <= share <= 1:
                raise BadTree(f"accuracy of head {head}, guess {rank} is {share}; it must be from 0 to 1")
        if sum(shares) > 1 + PROBABILITY_SLACK:
            raise BadTree(
                f"accuracies of head {head} sum to {sum(shares):.4f}; at most one guess of a head is right, "
                "so the limit is 1. Give the share of each rank alone, not of the top k together"
            )


class Method(StrEnum):
    NGRAM = "ngram"
    DRAFT_MODEL = "draft_model"
    MEDUSA = "medusa"
    EAGLE = "eagle"
    EAGLE3 = "eagle3"


GUESSES_FROM_TEXT = Method.NGRAM.value
"""The method that needs no second KV cache."""
METHODS_OF_ENGINE: Mapping[str, tuple[Method, ...]] = {
    "generic": (),
    "llama-cpp": (),
    "sglang": (),
    "sim": (),
    "tensorrt-llm": (),
    "triton": (),
    "vllm": (Method.NGRAM, Method.DRAFT_MODEL, Method.MEDUSA, Method.EAGLE, Method.EAGLE3),
    "neuron": (Method.MEDUSA, Method.EAGLE, Method.EAGLE3),
}

MEDUSA_GUESSES = 10
"""Guesses per head that NxD reads, `TOPK` of neuronx_distributed.utils.medusa_utils: guess r of head h has number 10 h
+ r."""
MOST_BATCH_RANGES = 16

BatchRange = tuple[int, int, int]
"""First and last number of requests in a step, and the number of guessed tokens in such a step."""


@dataclass(frozen=True, slots=True)
class Ngram:
    """Guesses the tokens that followed an earlier occurrence of the last tokens: `tokens` per step, matching
    `lookup_min` to `lookup_max` of them."""

    tokens: int
    lookup_min: int
    lookup_max: int
    by_batch: tuple[BatchRange, ...] = ()


@dataclass(frozen=True, slots=True)
class Draft:
    """Separate weights guess a chain of `tokens` tokens: a smaller model, one trained on the target's features (EAGLE),
    or heads on the target (vLLM's Medusa, best guesses only)."""

    method: Method
    tokens: int
    artifact: Artifact
    by_batch: tuple[BatchRange, ...] = ()


@dataclass(frozen=True, slots=True)
class Medusa:
    """Heads on the model itself guess; `tree` lists the verified combinations. For NxDI."""

    heads: int
    tree: tuple[Path, ...]

    @property
    def length(self) -> int:
        """Tokens that one step verifies: every path's last guess, and the step's own token."""
        return len(self.tree) + 1


Speculation = Ngram | Draft | Medusa


def read_speculation(reference: str, engine: str, stated: Mapping[str, Any]) -> Speculation | None:
    """The speculation of a version; None if it has none. Raises InvalidVersion if the engine does not support the
    method, or a field is missing, invalid or unknown."""
    if not stated:
        return None
    fields = FieldReader(f"{reference}: speculation", stated)
    methods = METHODS_OF_ENGINE[engine]
    if not methods:
        raise InvalidVersion(
            f"{reference}: speculation is {dict(stated)!r}; engine {engine} does not support it, leave it empty"
        )
    given = stated.get("method")
    if given not in methods:
        raise fields.wrong("method", f"on engine {engine} it must be one of {', '.join(methods)}")
    method = Method(fields.choice("method", methods))
    read = _medusa(fields) if method is Method.MEDUSA and engine == "neuron" else _chain(fields, method, engine)
    fields.finish()
    return read


def _chain(fields: FieldReader, method: Method, engine: str) -> Ngram | Draft:
    """Methods that guess one token after another. Only vLLM can guess fewer in larger batches."""
    read: Ngram | Draft
    if method is Method.NGRAM:
        read = _ngram(fields)
    else:
        if method is Method.MEDUSA:
            _refuse_tree(fields)
        read = Draft(method, fields.whole("tokens"), _draft_artifact(fields))
    return replace(read, by_batch=_by_batch(fields, read.tokens)) if engine == "vllm" else read


def _refuse_tree(fields: FieldReader) -> None:
    for name in ("tree", "heads", "top_k"):
        if fields.given(name) is not None:
            raise fields.wrong_because(
                name,
                (
                    "vLLM verifies only the chain of the heads' best guesses; leave it out and state tokens, the "
                    "length of that chain. Trees need NxDI (engine neuron)"
                ),
            )


def _by_batch(fields: FieldReader, tokens: int) -> tuple[BatchRange, ...]:
    """The field `tokens_per_batch_size` in vLLM's form: ranges of batch sizes that begin at 1 and do not overlap;
    between and after ranges the previous range applies."""
    stated = fields.given("tokens_per_batch_size")
    if stated is None:
        return ()
    rule = (
        f"it must be a list of [first, last, tokens] in order, the first from 1, with 0 to {tokens} tokens (0: off), "
        f"such as [[1, 4, {tokens}], [5, 64, 0]]"
    )
    if not isinstance(stated, list) or not stated or len(stated) > MOST_BATCH_RANGES:
        raise fields.wrong("tokens_per_batch_size", rule)
    next_first = 1
    for each in stated:
        if not isinstance(each, list | tuple) or len(each) != 3 or any(type(number) is not int for number in each):
            raise fields.wrong_because("tokens_per_batch_size", f"{each!r} is not a range; {rule}")
        first, last, guessed = each
        if (first < next_first if next_first > 1 else first != 1) or last < first or not 0 <= guessed <= tokens:
            raise fields.wrong_because(
                "tokens_per_batch_size", f"{each!r} cannot follow batch {next_first - 1}; {rule}"
            )
        next_first = last + 1
    return tuple((first, last, guessed) for first, last, guessed in stated)


def _ngram(fields: FieldReader) -> Ngram:
    tokens, longest = fields.whole("tokens"), fields.whole("lookup_max", default=4)
    shortest = fields.whole("lookup_min", default=min(2, longest))
    if shortest > longest:
        raise fields.wrong("lookup_min", f"it must be at most lookup_max, {longest}")
    return Ngram(tokens, shortest, longest)


def _medusa(fields: FieldReader) -> Medusa:
    heads = fields.whole("heads")
    top_k = fields.whole("top_k", default=MEDUSA_GUESSES)
    if top_k > MEDUSA_GUESSES:
        raise fields.wrong("top_k", f"NxD reads {MEDUSA_GUESSES} guesses per head, so it must be at most that")
    try:
        return Medusa(heads, check_tree(fields.given("tree"), heads=heads, top_k=top_k))
    except BadTree as error:
        raise fields.wrong_because("tree", str(error)) from None


def _draft_artifact(fields: FieldReader) -> Artifact:
    uri, digest = fields.text("draft_uri"), fields.text("draft_digest")
    try:
        parse_place(uri)
    except BadArtifact:
        raise fields.wrong("draft_uri", "it must be file:///absolute/path or s3://bucket/prefix, without ..") from None
    if not digest.startswith("sha256:"):
        raise fields.wrong("draft_digest", "it must be sha256:<hex>, the digest of the draft's manifest")
    return Artifact(uri, digest)
