"""The stack fingerprint: which software a rank runs, as named fields, and whether the ranks of a cell agree in it (I2).

Pure, and only the standard library, because engine processes import it in environments of their own. It reads no
machine; `engine_agent.node.telemetry.fingerprint` does, and hands the result to the engine in `FINGERPRINT_VARIABLE`.

How an engine uses it: every rank reads `own = fingerprint_from(os.environ)`. A follower sends `own` to the leader in
its authenticated handshake; the leader calls `mismatch(own, theirs)`. Is that not empty, then the cell cannot form:
the leader refuses the follower, and both end with that sentence as the last line of their log, which becomes the
reason of the cell.

A node says what is true of the machine: fields such as `kernel`, and per engine `<engine>.<field>`. What a rank of a
cell runs has no dots: the machine's fields, those of the cell's engine, and `flags`, `weights` and `adapters` of its
assignment.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

FINGERPRINT_VARIABLE = "SWITCHYARD_FINGERPRINT"
"""Environment variable of every engine process: the rank's fingerprint as a JSON object of strings."""
FINGERPRINT_MAX_FIELDS = 48
FINGERPRINT_MAX_NAME = 64
FINGERPRINT_MAX_VALUE = 160
"""Limits, in characters, that keep a fingerprint well below any frame it travels in."""
ABSENT = "absent"
"""How a value is called that one rank has and another has not."""
_DIGEST_DIGITS = 12

Fingerprint = Mapping[str, str]


class BadFingerprint(ValueError):
    """Not a fingerprint; the text says what is wrong and what would be right."""


@dataclass(frozen=True, slots=True)
class Rank:
    """A member of a cell and what it runs."""

    rank: int
    node: str
    fingerprint: Fingerprint

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.node})"


@dataclass(frozen=True, slots=True)
class Difference:
    """A field in which ranks differ; `values` in the order of the ranks that were compared, None where it is absent."""

    field: str
    values: tuple[str | None, ...]


def fingerprint_digest(fingerprint: Fingerprint) -> str:
    """Twelve hexadecimal digits (48 bits of SHA-256) that are equal exactly where all fields are."""
    text = json.dumps(dict(fingerprint), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:_DIGEST_DIGITS]


def engine_fingerprint(machine: Fingerprint, engine: str) -> dict[str, str]:
    """What a machine's fingerprint says of cells of one engine: its own fields and that engine's, without the prefix.

    An engine's field wins over the machine's of the same name.
    """
    own = {field: value for field, value in machine.items() if "." not in field}
    prefix = f"{engine}."
    return own | {field.removeprefix(prefix): value for field, value in machine.items() if field.startswith(prefix)}


def rank_fingerprint(
    machine: Fingerprint,
    engine: str,
    args: Sequence[str],
    env: Mapping[str, str],
    weights: str | None,
    adapters: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, str]:
    """What one rank of a cell runs. `args` and `env` are the engine plan's, `weights` the digest of its artifact,
    `adapters` the digest of each adapter by name."""
    fields = engine_fingerprint(machine, engine) | {"flags": flags_digest(args, env)}
    if adapters:
        fields["adapters"] = fingerprint_digest(adapters)
    return fields if weights is None else fields | {"weights": weights}


def flags_digest(args: Sequence[str], env: Mapping[str, str]) -> str:
    """Digest of an engine's flags, whichever way they are written: order, `--a=b` or `--a b`, `_` or `-` in a name.

    Of a flag that is given twice the order of its values counts, as for engines the last one does.
    """
    given: dict[str, list[str]] = {"": []}
    name = ""
    for arg in args:
        if arg.startswith("--"):
            flag, equals, value = arg.partition("=")
            name = flag.replace("_", "-")
            given.setdefault(name, []).extend([value] if equals else [])
        else:
            given[name].append(arg)
    return fingerprint_digest({"args": json.dumps(given, sort_keys=True), "env": json.dumps(dict(env), sort_keys=True)})


def differing_fields(fingerprints: Sequence[Fingerprint]) -> tuple[Difference, ...]:
    """The fields in which not all fingerprints agree, by name. A field that only some have is one of them."""
    names = sorted({name for fingerprint in fingerprints for name in fingerprint})
    rows = (Difference(name, tuple(fingerprint.get(name) for fingerprint in fingerprints)) for name in names)
    return tuple(row for row in rows if len(set(row.values)) > 1)


def mismatch(leader: Rank, other: Rank) -> str:
    """Why these two cannot form a cell, naming rank, field and both values; empty if they can."""
    differences = differing_fields((leader.fingerprint, other.fingerprint))
    if not differences:
        return ""
    fields = "; ".join(
        f"{difference.field} is {difference.values[1] or ABSENT} instead of {difference.values[0] or ABSENT}"
        for difference in differences
    )
    return f"fingerprint mismatch: {other} differs from {leader}: {fields}"


def first_mismatch(ranks: Iterable[Rank]) -> str:
    """`mismatch` of the lowest rank that differs from the first one; empty where all agree."""
    by_rank = sorted(ranks, key=lambda rank: rank.rank)
    return next((reason for other in by_rank[1:] if (reason := mismatch(by_rank[0], other))), "")


def fingerprint_to_variable(fingerprint: Fingerprint) -> str:
    """What `FINGERPRINT_VARIABLE` holds."""
    return json.dumps(dict(fingerprint), sort_keys=True)


def fingerprint_from(environment: Mapping[str, str]) -> dict[str, str]:
    """The fingerprint that this process was started with; empty if none was given, as when started by hand.

    Raises:
        BadFingerprint: the variable does not hold one.
    """
    text = environment.get(FINGERPRINT_VARIABLE)
    return {} if not text else checked_fingerprint(text, FINGERPRINT_VARIABLE)


def checked_fingerprint(text: str | bytes, where: str) -> dict[str, str]:
    """A fingerprint from JSON; `where` names its source in errors.

    Raises:
        BadFingerprint: it is not an object of short strings.
    """
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise BadFingerprint(f"{where} is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise BadFingerprint(f"{where} must be a JSON object of strings, not {type(fields).__name__}")
    for name, value in fields.items():
        if not isinstance(value, str):
            raise BadFingerprint(f"{where}: {name} must be a string, not {json.dumps(value)[:40]}")
        if not value or len(value) > FINGERPRINT_MAX_VALUE or not name or len(name) > FINGERPRINT_MAX_NAME:
            limits = f"1 to {FINGERPRINT_MAX_NAME} characters a name, 1 to {FINGERPRINT_MAX_VALUE} a value"
            raise BadFingerprint(f"{where}: {name[:FINGERPRINT_MAX_NAME]!r} is empty or too long; {limits}")
    if len(fields) > FINGERPRINT_MAX_FIELDS:
        raise BadFingerprint(f"{where} has {len(fields)} fields; at most {FINGERPRINT_MAX_FIELDS} are allowed")
    return fields
