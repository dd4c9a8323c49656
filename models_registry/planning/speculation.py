"""What a model version says of speculation: a cheap guess of the next tokens that the model then verifies at once.

Reads and checks the field `speculation`; the arguments of engines are for the modules that render them. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from engine_agent.protocol.messages import Artifact
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
    "vllm": (Method.NGRAM, Method.DRAFT_MODEL),
    "neuron": (Method.MEDUSA, Method.EAGLE, Method.EAGLE3),
}


MEDUSA_GUESSES = 10
"""Guesses of one head that NxD reads, `TOPK` of neuronx_distributed.utils.medusa_utils: guess r of head h stands at
10 h + r."""


@dataclass(frozen=True, slots=True)
class Ngram:
    """Guesses what followed the last tokens when they occurred before: `tokens` at once, matching from
    `lookup_min` to `lookup_max` of them."""

    tokens: int
    lookup_min: int
    lookup_max: int


@dataclass(frozen=True, slots=True)
class Draft:
    """A smaller model guesses `tokens` tokens: a plain one, or one trained on the target's features (EAGLE)."""

    method: Method
    tokens: int
    artifact: Artifact


@dataclass(frozen=True, slots=True)
class Medusa:
    """Heads on the model itself guess; `tree` says which combinations are verified."""

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
    read: Speculation
    if method is Method.NGRAM:
        read = _ngram(fields)
    elif method is Method.MEDUSA:
        read = _medusa(fields)
    else:
        read = Draft(method, fields.whole("tokens"), _draft_artifact(fields))
    fields.finish()
    return read


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
    if not uri.startswith(("file:///", "s3://")):
        raise fields.wrong("draft_uri", "it must be file:///absolute/path or s3://bucket/prefix")
    if not digest.startswith("sha256:"):
        raise fields.wrong("draft_digest", "it must be sha256:<hex>, the digest of the draft's manifest")
    return Artifact(uri, digest)
