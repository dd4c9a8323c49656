"""What a model version says of speculation: a cheap guess of the next tokens that the model then verifies at once.

Reads and checks the field `speculation`; the arguments of engines are for the modules that render them. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from engine_agent.protocol.manifest import BadArtifact
from engine_agent.protocol.messages import Artifact
from models_registry.planning.artifact_rules import parse_place
from models_registry.planning.fields import FieldReader
from models_registry.planning.medusa_tree import BadTree, Path, check_tree
from models_registry.planning.version_spec import InvalidVersion


class Method(StrEnum):
    NGRAM = "ngram"
    DRAFT_MODEL = "draft_model"
    MEDUSA = "medusa"
    EAGLE = "eagle"
    EAGLE3 = "eagle3"


METHODS_OF_ENGINE: Mapping[str, tuple[Method, ...]] = {
    "generic": (),
    "sim": (),
    "vllm": (Method.NGRAM, Method.DRAFT_MODEL, Method.MEDUSA, Method.EAGLE, Method.EAGLE3),
    "neuron": (Method.MEDUSA, Method.EAGLE, Method.EAGLE3),
}

MEDUSA_GUESSES = 10
"""Guesses of one head that NxD reads, `TOPK` of neuronx_distributed.utils.medusa_utils: guess r of head h stands at
10 h + r."""
MOST_BATCH_RANGES = 16

BatchRange = tuple[int, int, int]
"""First and last number of requests in a step, and how many tokens are guessed for each of them in such a step."""


@dataclass(frozen=True, slots=True)
class Ngram:
    """Guesses what followed the last tokens when they occurred before: `tokens` at once, matching from
    `lookup_min` to `lookup_max` of them."""

    tokens: int
    lookup_min: int
    lookup_max: int
    by_batch: tuple[BatchRange, ...] = ()


@dataclass(frozen=True, slots=True)
class Draft:
    """Weights of their own guess `tokens` tokens in a chain: a smaller model, one trained on the target's features
    (EAGLE), or heads on the target (Medusa as vLLM has it, best guesses only)."""

    method: Method
    tokens: int
    artifact: Artifact
    by_batch: tuple[BatchRange, ...] = ()


@dataclass(frozen=True, slots=True)
class Medusa:
    """Heads on the model itself guess; `tree` says which combinations are verified. NxDI's."""

    heads: int
    tree: tuple[Path, ...]

    @property
    def length(self) -> int:
        """Tokens that one step verifies: every path's last guess, and the step's own token."""
        return len(self.tree) + 1


Speculation = Ngram | Draft | Medusa


def read_speculation(reference: str, engine: str, stated: Mapping[str, Any]) -> Speculation | None:
    """The speculation of a version; None where it states none.

    Raises:
        InvalidVersion: the engine has no such method, or a field is missing, wrong or unknown.
    """
    if not stated:
        return None
    fields = FieldReader(f"{reference}: speculation", stated)
    methods = METHODS_OF_ENGINE[engine]
    if not methods:
        raise InvalidVersion(f"{reference}: speculation is {dict(stated)!r}; engine {engine} has none, leave it empty")
    given = stated.get("method")
    if given not in methods:
        raise fields.wrong("method", f"on engine {engine} it must be one of {', '.join(methods)}")
    method = Method(fields.choice("method", methods))
    read = _medusa(fields) if method is Method.MEDUSA and engine == "neuron" else _chain(fields, method, engine)
    fields.finish()
    return read


def _chain(fields: FieldReader, method: Method, engine: str) -> Ngram | Draft:
    """What guesses one token after the other. vLLM alone can guess fewer of them in larger batches."""
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
                "vLLM verifies the chain of the heads' best guesses and no tree; leave it out and state tokens, the "
                "length of that chain. Trees are NxDI's (engine neuron)",
            )


def _by_batch(fields: FieldReader, tokens: int) -> tuple[BatchRange, ...]:
    """The field `tokens_per_batch_size` as vLLM takes it: ranges of batch sizes that begin at 1 and do not overlap;
    between and behind them the range before goes on."""
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
            raise fields.wrong_because("tokens_per_batch_size", f"{each!r} is no range; {rule}")
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
        raise fields.wrong("top_k", f"NxD reads {MEDUSA_GUESSES} guesses of each head, so it must be at most that")
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
