"""The stack fingerprint: the software of a rank as named fields, which must be equal on all ranks of a cell (I2).

Pure, and only the standard library, because engine processes import it in their own environments. An agent reads the
machine (`engine_agent.node.telemetry.fingerprint`) and passes the result to the engine in `FINGERPRINT_VARIABLE`.

Each rank of a cell reads its fingerprint from the environment. A follower sends it to the leader in the authenticated
handshake, and the leader calls `mismatch`. If that returns a sentence, the leader rejects the follower, and both exit
with the sentence as the last line of their logs. It becomes the reason of the cell.

A node reports fields of the machine, such as `kernel`, and `<engine>.<field>` for each engine. A rank's fingerprint has
no dots: the machine's fields, those of the cell's engine, and `flags`, `weights` and `adapters` of its assignment."""

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
"""Limits in characters, so that a fingerprint fits into any frame."""
ABSENT = "absent"
"""Stands for a value that one of two ranks does not have."""
_DIGEST_DIGITS = 12

Fingerprint = Mapping[str, str]


class BadFingerprint(ValueError):
    """Not a fingerprint; the text says what is wrong and what would be right."""


@dataclass(frozen=True, slots=True)
class Rank:
    rank: int
    node: str
    fingerprint: Fingerprint

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.node})"


@dataclass(frozen=True, slots=True)
class Difference:
    """A field in which ranks differ; `values` in the order of the compared ranks, None if absent."""

    field: str
    values: tuple[str | None, ...]


def fingerprint_digest(fingerprint: Fingerprint) -> str:
    """Twelve hexadecimal digits (48 bits of SHA-256), equal if and only if all fields are equal."""
    text = json.dumps(dict(fingerprint), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:_DIGEST_DIGITS]


def engine_fingerprint(machine: Fingerprint, engine: str) -> dict[str, str]:
    """The machine's fields and one engine's fields without their prefix; for equal names the engine's win."""
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
    build: str = "",
) -> dict[str, str]:
    """The fingerprint of one rank of a cell. `args` and `env` are the engine plan's, `weights` the digest of its
    artifact, `adapters` the digest of each adapter by name. `build`: the digest of its engine build, which replaces
    what is installed on the node; empty: none."""
    if build:
        fields = {field: value for field, value in machine.items() if "." not in field} | {"build": build}
    else:
        fields = engine_fingerprint(machine, engine)
    fields["flags"] = flags_digest(args, env)
    if adapters:
        fields["adapters"] = fingerprint_digest(adapters)
    return fields if weights is None else fields | {"weights": weights}


def flags_digest(args: Sequence[str], env: Mapping[str, str]) -> str:
    """Digest of an engine's flags, independent of their spelling: order, `--a=b` or `--a b`, `_` or `-` in a name. The
    order of values counts for a repeated flag, because engines use the last one."""
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
    """The fields in which the fingerprints differ, by name. A field that only some have is one of them."""
    names = sorted({name for fingerprint in fingerprints for name in fingerprint})
    rows = (Difference(name, tuple(fingerprint.get(name) for fingerprint in fingerprints)) for name in names)
    return tuple(row for row in rows if len(set(row.values)) > 1)


def mismatch(leader: Rank, other: Rank) -> str:
    """Why these two cannot form a cell, with rank, field and both values; empty if they can."""
    differences = differing_fields((leader.fingerprint, other.fingerprint))
    if not differences:
        return ""
    fields = "; ".join(
        f"{difference.field} is {difference.values[1] or ABSENT} instead of {difference.values[0] or ABSENT}"
        for difference in differences
    )
    return f"fingerprint mismatch: {other} differs from {leader}: {fields}"


def first_mismatch(ranks: Iterable[Rank]) -> str:
    by_rank = sorted(ranks, key=lambda rank: rank.rank)
    return next((reason for other in by_rank[1:] if (reason := mismatch(by_rank[0], other))), "")


def fingerprint_to_variable(fingerprint: Fingerprint) -> str:
    return json.dumps(dict(fingerprint), sort_keys=True)


def fingerprint_from(environment: Mapping[str, str]) -> dict[str, str]:
    """The fingerprint that this process was started with; empty if it has none, as when started by hand. Raises
    BadFingerprint if the variable does not contain one."""
    text = environment.get(FINGERPRINT_VARIABLE)
    return {} if not text else checked_fingerprint(text, FINGERPRINT_VARIABLE)


def checked_fingerprint(text: str | bytes, where: str) -> dict[str, str]:
    """Parses a fingerprint from JSON; `where` names its source in errors. Raises BadFingerprint if it is not an object
    of short strings."""
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise BadFingerprint(f"{where} is not JSON: {error}") from error
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
