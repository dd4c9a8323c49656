"""Faults that an operator or a test injects, and their effects on a member and its cell. This module stores and
combines them; engine, HTTP and process apply them. A cell computes in lock-step, so a slow, hung or wrong member makes
the whole cell slow, hung or wrong (`Effects`)."""

from collections.abc import Callable, Iterable
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

MOST_SLOW_FACTOR = 1000.0


class BadFault(ValueError):
    """A fault that cannot be injected; the text names the wrong field."""


class _Kind(Struct, frozen=True, tag_field="kind", forbid_unknown_fields=True):
    """What all faults share on the wire: `kind`."""


class Slow(_Kind, frozen=True, tag="slow"):
    """Every step takes `factor` times as long."""

    factor: Annotated[float, Meta(ge=1.0, le=MOST_SLOW_FACTOR)]


class Hang(_Kind, frozen=True, tag="hang"):
    """No step ends; health and heartbeats stay good, as when a collective hangs."""


class Error(_Kind, frozen=True, tag="error"):
    """A share of the requests (`ratio`) is answered with 500."""

    ratio: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0


class Crash(_Kind, frozen=True, tag="crash"):
    """The process is killed by SIGKILL."""


class Unready(_Kind, frozen=True, tag="unready"):
    """`/health` answers 503, while requests are still answered."""


class WrongAnswer(_Kind, frozen=True, tag="wrong_answer"):
    """Every word of an answer is wrong, as from damaged weights."""


Fault = Slow | Hang | Error | Crash | Unready | WrongAnswer

_decoder: "msgspec.json.Decoder[Fault]" = msgspec.json.Decoder(Fault)
_KINDS = "slow, hang, error, crash, unready, wrong_answer"


class Effects(Struct, frozen=True):
    """What a member's faults do to the computation of its cell."""

    slow_factor: float = 1.0
    hang: bool = False
    wrong_answer: bool = False


def parse_fault(body: bytes) -> Fault:
    """Returns the fault that a request states. Raises BadFault if the body is not JSON, an unknown kind, or has a field
    that is missing, unknown or out of range."""
    try:
        return _decoder.decode(body)
    except msgspec.ValidationError as error:
        text = str(error)
        hint = f"; kind is one of {_KINDS}" if "kind" in text else ""
        raise BadFault(f"{text}{hint}") from error
    except msgspec.DecodeError as error:
        raise BadFault(f"the body is not JSON: {error}") from error


def combine_effects(effects: Iterable[Effects]) -> Effects:
    """Combines the effects of all members: the slowest sets the pace."""
    members = tuple(effects)
    return Effects(
        slow_factor=max((member.slow_factor for member in members), default=1.0),
        hang=any(member.hang for member in members),
        wrong_answer=any(member.wrong_answer for member in members),
    )


class Faults:
    """The faults in force in this process, at most one of each kind."""

    def __init__(self) -> None:
        self._by_kind: dict[type[Fault], Fault] = {}
        self._on_change: list[Callable[[], None]] = []

    def subscribe(self, on_change: Callable[[], None]) -> None:
        self._on_change.append(on_change)

    def put(self, fault: Fault) -> None:
        self._by_kind[type(fault)] = fault
        self._changed()

    def clear(self) -> None:
        self._by_kind.clear()
        self._changed()

    def in_force(self) -> tuple[Fault, ...]:
        return tuple(self._by_kind.values())

    @property
    def unready(self) -> bool:
        return Unready in self._by_kind

    @property
    def error_ratio(self) -> float:
        fault = self._by_kind.get(Error)
        return fault.ratio if isinstance(fault, Error) else 0.0

    def effects(self) -> Effects:
        slow = self._by_kind.get(Slow)
        return Effects(
            slow_factor=slow.factor if isinstance(slow, Slow) else 1.0,
            hang=Hang in self._by_kind,
            wrong_answer=WrongAnswer in self._by_kind,
        )

    def _changed(self) -> None:
        for on_change in self._on_change:
            on_change()
