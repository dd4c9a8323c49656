"""States of cells, nodes and rollouts in recorded snapshots of the reconciler: all that pages of the past show. The
rest of a snapshot, mostly reports of nodes, is skipped in the bytes. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from types import GenericAlias
from typing import Any, get_type_hints

import msgspec
from msgspec.msgpack import decode

from fleet.reconcile.planning.snapshot import MemberView
from fleet.reconcile.planning.states import CellState, NodeState, RolloutState
from fleet.recorder.planning.encoding import SLID, TIMES, checked_rows, damage_named, inflated, new_value, rekeyed
from fleet.recorder.planning.explanations import RECONCILER


class CellThen(msgspec.Struct, frozen=True, gc=False):
    """A cell; fields as in `CellView`."""

    id: str
    deployment: str
    region: str
    state: CellState
    state_since: datetime
    generation: int = 0
    version: str = ""
    reason: str = ""
    members: tuple[MemberView, ...] = ()


class NodeThen(msgspec.Struct, frozen=True, gc=False):
    """A machine; fields as in `NodeView`."""

    id: str
    region: str
    instance_type: str
    state: NodeState
    state_since: datetime
    cordoned: bool = False


class RolloutThen(msgspec.Struct, frozen=True, gc=False):
    """An active rollout; fields as in `RolloutView`."""

    id: int
    deployment: str
    to_version: str
    state: RolloutState
    state_since: datetime
    reason: str = ""


class TargetThen(msgspec.Struct, frozen=True, gc=False):
    """Target cells of a deployment by region, as in `DeploymentView`."""

    cells_wanted: Mapping[str, int]


class StatesThen(msgspec.Struct, frozen=True):
    """The part of a `FleetView` that pages of the past show, under its names and in its order."""

    cells: Mapping[str, CellThen] = {}
    nodes: Mapping[str, NodeThen] = {}
    rollouts: Mapping[str, RolloutThen] = {}
    deployments: Mapping[str, TargetThen] = {}

    @property
    def size(self) -> int:
        """Number of rows, each of 200 to 400 bytes."""
        return len(self.cells) + len(self.nodes) + len(self.rollouts)


class _Row(msgspec.Struct):
    """A recorded row without its decisions; it has a view or an edit."""

    now: datetime
    view: StatesThen | None = None
    edit: msgspec.Raw = msgspec.Raw(b"\xc0")


_Edit = list[msgspec.Raw] | None
"""An edit of `encoding`, or of a mapping in it: one of two parts has the edits of fields, or the new mapping."""
_Column = tuple[tuple[str, ...], str, msgspec.Raw, msgspec.Raw]
_KINDS: dict[str, type] = {"cells": CellThen, "nodes": NodeThen, "rollouts": RolloutThen, "deployments": TargetThen}
_TYPES = {kind: get_type_hints(kind) for kind in _KINDS.values()}


def decode_states(chain: Sequence[bytes], schema: str, wanted: Sequence[bool]) -> Iterator[StatesThen]:
    """The states in the `wanted` rows of a chain that begins with a whole snapshot. Raises CannotDecode as
    `decode_rounds`."""
    states = StatesThen()
    for number, packed in checked_rows(RECONCILER, chain, schema):
        with damage_named(number):
            row = decode(inflated(packed), type=_Row)
            states = row.view or _edited_states(states, row.edit, row.now)
        if wanted[number]:
            yield states


def _edited_states(states: StatesThen, packed: msgspec.Raw, now: datetime) -> StatesThen:
    edit = decode(packed, type=_Edit)
    if edit is None:
        return states
    of_fields = decode(edit[1], type=dict[str, msgspec.Raw])
    return msgspec.structs.replace(
        states,
        **{
            name: _edited_mapping(getattr(states, name), of_fields[name], kind, now)
            for name, kind in _KINDS.items()
            if name in of_fields
        },
    )


def _edited_mapping(rows: Mapping[str, Any], packed: msgspec.Raw, kind: Any, now: datetime) -> Mapping[str, Any]:
    edit = decode(packed, type=_Edit)
    if edit is None:
        return rows
    if len(edit) == 2:
        return decode(edit[1], type=dict[str, kind])
    gone, added = decode(edit[1], type=list[int]), decode(edit[2], type=list[tuple[int, dict[str, kind]]])
    names, changed = list(rows), dict[str, dict[str, Any]]()
    for path, form, distances, values in decode(edit[3], type=list[_Column]):
        if (known := _TYPES[kind].get(path[0])) is None:
            continue
        position, stated = 0, {SLID: GenericAlias(tuple, (int, known)), TIMES: int}.get(form, known)
        typed = decode(values, type=GenericAlias(list, (stated,)))
        for distance, value in zip(decode(distances, type=list[int]), typed, strict=True):
            position += distance
            name = names[position]
            new = new_value(getattr(rows[name], path[0]), form, value, now)
            changed.setdefault(name, {})[path[0]] = tuple(new) if form == SLID else new
    if changed:
        rows = {**rows, **{name: msgspec.structs.replace(rows[name], **new) for name, new in changed.items()}}
    return rekeyed(rows, gone, added) if gone or added else rows
