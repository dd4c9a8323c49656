"""Frozen dataclasses <-> bytes, and a snapshot as the difference to an earlier one. Encoding and decoding follow the
types, so a new field of a view needs no change here. `schema_of` identifies the types; bytes of another schema are
refused, because a replay on guessed inputs proves nothing. Differences are computed on objects, which two snapshots
mostly share, and applied to plain data, which become objects once, at the end."""

import hashlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from datetime import datetime, timedelta
from enum import Enum
from functools import cache, lru_cache
from operator import attrgetter
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

from fleet.recorder.planning.loops import Decided, RecordedLoop, Round

LEVEL = 1
"""Of zlib: the others take two to six times as long for a tenth fewer bytes."""
LARGEST_BYTES = 256 * 1024 * 1024
"""Of the plain data of one round, against damaged rows."""
LONGEST_SLIDE = 8
"""Values that a sequence may lose at its beginning to count as the same one. Windows of steps lose one at a time."""
MICROSECOND = timedelta(microseconds=1)


class CannotDecode(Exception):
    """The bytes are of another release's types, or damaged; the text says which."""


# --- bytes -----------------------------------------------------------------------------------------------------------


def encode_round(one: Round, before: object | None) -> bytes:
    """With `before`, the snapshot is the difference to it, and the settings are left out."""
    decided = [[part.planner, _named(part.decisions), part.applied] for part in one.decided]
    if before is None:
        inputs: dict[str, Any] = {"view": one.view, "settings": one.settings}
    else:
        inputs = {"edit": _edit_of(before, one.view, one.now)}
    return zlib.compress(msgspec.msgpack.encode({"now": one.now, "decided": decided, **inputs}), LEVEL)


def _named(decisions: Sequence[Any]) -> list[tuple[str, Any]]:
    return [(type(decision).__name__, decision) for decision in decisions]


def decode_rounds(
    loop: RecordedLoop, chain: Sequence[bytes], schema: str, *, wanted: Sequence[bool] | None = None
) -> Iterator[Round]:
    """The rounds of a chain that begins with a whole snapshot; only those `wanted` are built. Raises CannotDecode if
    the types differ from this release's or the bytes are damaged."""
    settings, view = loop.settings(), None
    for number, row in checked_rows(loop, chain, schema):
        with damage_named(number):
            plain = msgspec.msgpack.decode(inflated(row))
            if "view" in plain:
                view, settings = plain["view"], msgspec.convert(plain["settings"], loop.settings)
            else:
                view = edited(view, plain["edit"], plain["now"])
            if wanted is not None and not wanted[number]:
                continue
            decided = tuple(_decided(loop, part) for part in plain["decided"])
            found = Round(msgspec.convert(view, loop.view), settings, plain["now"], decided)
        yield found


def checked_rows(loop: RecordedLoop, chain: Sequence[bytes], schema: str) -> Iterator[tuple[int, bytes]]:
    """The rows of a chain with their numbers. Raises CannotDecode if its types differ from this release's."""
    if schema != schema_of(loop):
        raise CannotDecode("the types of its snapshots differ from those of this release")
    yield from enumerate(chain)


@contextmanager
def damage_named(number: int) -> Iterator[None]:
    """Raises CannotDecode with the row's number if its bytes are damaged."""
    try:
        yield
    except (msgspec.MsgspecError, zlib.error, KeyError, IndexError, TypeError, ValueError) as wrong:
        raise CannotDecode(f"row {number + 1} of its chain is damaged: {wrong}") from wrong


def inflated(row: bytes) -> bytes:
    """The plain data of a row. Raises ValueError if it is cut off or too large."""
    inflating = zlib.decompressobj()
    plain = inflating.decompress(row, LARGEST_BYTES)
    if not inflating.eof:
        raise ValueError(f"it is cut off, or longer than {LARGEST_BYTES} bytes")
    return plain


def _decided(loop: RecordedLoop, plain: Any) -> Decided:
    planner, decisions, applied = plain
    kinds: dict[str, Any] = {kind.__name__: kind for kind in loop.decisions}
    made = tuple(msgspec.convert(fields, kinds[kind]) for kind, fields in decisions)
    return Decided(planner, made, tuple(applied))


def canonical(decision: Any) -> bytes:
    """Equal for a decision and its decoded copy: a float that was an integer, and a tuple in evidence, differ only
    before they are stored."""
    packed = msgspec.msgpack.encode(decision)
    return msgspec.msgpack.encode(msgspec.msgpack.decode(packed, type=type(decision)))


# --- schema ----------------------------------------------------------------------------------------------------------


def _described(kind: Any, known: dict[str, str]) -> str:
    """A type in words. `known`: dataclasses, structs and enumerations already described, by name."""
    if isinstance(kind, type) and (is_dataclass(kind) or issubclass(kind, Enum | msgspec.Struct)):
        name = f"{kind.__module__}.{kind.__qualname__}"
        if name not in known:
            known[name] = ""
            if issubclass(kind, Enum):
                known[name] = repr([member.value for member in kind])
            else:
                hints = get_type_hints(kind)
                known[name] = repr([(field, _described(hint, known)) for field, hint in hints.items()])
        return name
    inner = [_described(part, known) for part in get_args(kind)]
    return f"{get_origin(kind) or kind}{inner if inner else ''}"


@cache
def schema_of(loop: RecordedLoop) -> str:
    """Digest of all types of a loop's rounds."""
    known: dict[str, str] = {}
    for kind in (loop.view, loop.settings, *loop.decisions):
        _described(kind, known)
    return hashlib.sha256(repr(sorted(known.items())).encode()).hexdigest()[:16]


# --- differences -----------------------------------------------------------------------------------------------------
# An edit is None (nothing changed) or one of
#   ["=", value]                    the new value
#   ["+", dropped, added]           a sequence lost its first values and got some at its end
#   [".", {field: edit}]            a dataclass
#   ["#", gone, added, columns]     a mapping: positions of keys that are gone, [position, {key: value}] of new ones,
#                                   and changed values by path and form: mostly times of last reports

VALUE, SLID, TIMES = "=", "+", "t"
_Changes = dict[tuple[tuple[str, ...], str], tuple[list[int], list[Any]]]
"""Positions and new values by path and form."""


@lru_cache(256)
def _parts(kind: Any) -> Any:
    """Names and a getter of a dataclass's plain fields, and the names of those that hold dataclasses; None for other
    types."""
    if not is_dataclass(kind):
        return None
    hints = get_type_hints(kind)
    nested = [one.name for one in fields(kind) if any(map(is_dataclass, (hints[one.name], *get_args(hints[one.name]))))]
    plain = [one.name for one in fields(kind) if one.name not in nested]
    return tuple(plain), attrgetter(*plain, plain[0]), tuple(nested)


def _edit_of(old: Any, new: Any, now: datetime) -> list[Any] | None:
    if old is new:
        return None
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return _edit_of_mapping(old, new, now)
    if type(old) is type(new) and is_dataclass(old) and not isinstance(old, type):
        found = {
            one.name: edit
            for one in fields(old)
            if (edit := _edit_of(getattr(old, one.name), getattr(new, one.name), now)) is not None
        }
        return [".", found] if found else None
    if old == new:
        return None
    form, value = _leaf(old, new)
    return [form, *value] if form == SLID else [form, value]


def _leaf(old: Any, new: Any) -> tuple[str, Any]:
    if isinstance(old, tuple) and isinstance(new, tuple) and new:
        for dropped in range(min(len(old), LONGEST_SLIDE)):
            if new[: len(old) - dropped] == old[dropped:]:
                return SLID, (dropped, new[len(old) - dropped :])
    return VALUE, new


def _edit_of_mapping(old: Mapping[Any, Any], new: Mapping[Any, Any], now: datetime) -> list[Any] | None:
    gone: list[int] = []
    added: list[tuple[int, dict[Any, Any]]] = []
    if list(old) != list(new):
        gone = [position for position, key in enumerate(old) if key not in new]
        added = [(position, {key: new[key]}) for position, key in enumerate(new) if key not in old]
        if [key for key in old if key in new] != [key for key in new if key in old]:
            return [VALUE, new]  # in another order
    changes: _Changes = {}
    for position, (key, value) in enumerate(old.items()):
        if (other := new.get(key, value)) is not value:
            _note_changes(value, other, (), position, changes)
    columns = [_column(path, form, *found, now) for (path, form), found in changes.items()]
    return ["#", gone, added, columns] if gone or added or columns else None


def _note_changes(old: Any, new: Any, path: tuple[str, ...], position: int, changes: _Changes) -> None:
    """This is most of the recorder's time: once for each node that reported since the last round. Comparing tuples
    finds quickly that a node's own fields are equal."""
    kind = type(old)
    parts = _parts(kind) if kind is type(new) else None  # type: ignore[arg-type] # a class is hashable
    if parts is None:
        if old != new:
            _note_value(old, new, path, position, changes)
        return
    names, get, nested = parts
    olds, news = get(old), get(new)
    if olds != news:
        for name, one, other in zip(names, olds, news, strict=False):
            if one is not other and one != other:
                _note_value(one, other, (*path, name), position, changes)
    for name in nested:
        one, other = getattr(old, name), getattr(new, name)
        if one is not other:
            _note_changes(one, other, (*path, name), position, changes)


def _note_value(old: Any, new: Any, path: tuple[str, ...], position: int, changes: _Changes) -> None:
    form, value = _leaf(old, new) if type(old) is tuple else (VALUE, new)
    column = changes.get((path, form))
    if column is None:
        column = changes[path, form] = ([], [])
    column[0].append(position)
    column[1].append(value)


def _column(path: tuple[str, ...], form: str, positions: list[int], values: list[Any], now: datetime) -> list[Any]:
    """Positions as distances and times as microseconds before `now`: both are small numbers, which compress well."""
    distances = [position - before for position, before in zip(positions, [0, *positions], strict=False)]
    if form == VALUE and all(type(value) is datetime for value in values):
        form, values = TIMES, [(now - value) // MICROSECOND for value in values]
    return [path, form, distances, values]


def edited(plain: Any, edit: Sequence[Any] | None, now: datetime) -> Any:
    """The plain data after an edit, which may change them in place."""
    if edit is None:
        return plain
    form = edit[0]
    if form == ".":
        for name, inner in edit[1].items():
            plain[name] = edited(plain[name], inner, now)
        return plain
    if form == "#":
        _, gone, added, columns = edit
        return _edited_mapping(plain, gone, added, columns, now)
    return new_value(plain, form, edit[1:] if form == SLID else edit[1], now)


def new_value(old: Any, form: str, value: Any, now: datetime) -> Any:
    """A value after its edit of this form."""
    if form == SLID:
        dropped, added = value
        return [*old[dropped:], *added]
    return now - value * MICROSECOND if form == TIMES else value


def _edited_mapping(
    plain: dict[Any, Any], gone: Sequence[int], added: Sequence[Any], columns: Sequence[Any], now: datetime
) -> dict[Any, Any]:
    keys = list(plain)
    for path, form, distances, values in columns:
        position = 0
        for distance, value in zip(distances, values, strict=True):
            position += distance
            holder, name = plain, keys[position]
            for step in path:
                holder, name = holder[name], step
            holder[name] = new_value(holder[name], form, value, now)
    return rekeyed(plain, gone, added) if gone or added else plain


def rekeyed(plain: Mapping[Any, Any], gone: Sequence[int], added: Sequence[tuple[int, Any]]) -> dict[Any, Any]:
    """A mapping without the keys at the positions `gone`, and with the ones `added` at their positions."""
    dropped = set(gone)
    rest = iter([item for position, item in enumerate(plain.items()) if position not in dropped])
    new = {position: next(iter(one.items())) for position, one in added}
    size = len(plain) - len(gone) + len(added)
    return dict(new[position] if position in new else next(rest) for position in range(size))
