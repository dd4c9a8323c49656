"""How many spares a region keeps warm, and which of them only repairs may use. Reads what is stated, no more."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

WARM_MAX = 10_000


class InvalidWarmSpares(ValueError):
    """Not a statement of warm spares; the text says what is wrong and what would be right."""


@dataclass(frozen=True, slots=True)
class WarmSpares:
    """`warm` idle nodes of a type are kept; new cells must leave `repair_only` of them, so that repairs need not wait
    for a machine to boot."""

    warm: int
    repair_only: int = 0


def parse_warm_spares(stated: Mapping[str, Any]) -> dict[str, WarmSpares]:
    """Instance type -> what to keep, from `{"trn1.32xlarge": 2}` or `{"trn1.32xlarge": {"warm": 2, "repair_only": 1}}`.

    Raises:
        InvalidWarmSpares: a value of another form, or more for repair than are kept.
    """
    return {kind: _parse(kind, value) for kind, value in stated.items()}


def _parse(kind: str, value: Any) -> WarmSpares:
    fields = value if isinstance(value, Mapping) else {"warm": value}
    unknown = sorted(set(fields) - {"warm", "repair_only"})
    if unknown or "warm" not in fields:
        raise InvalidWarmSpares(f'spares.{kind} is {value!r}; it must be a number or {{"warm": …, "repair_only": …}}')
    for name, number in fields.items():
        if type(number) is not int or not 0 <= number <= WARM_MAX:
            raise InvalidWarmSpares(f"spares.{kind}: {name} is {number!r}; it must be a whole number to {WARM_MAX}")
    spares = WarmSpares(**fields)
    if spares.repair_only > spares.warm:
        raise InvalidWarmSpares(f"spares.{kind}: repair_only is {spares.repair_only}; it must be at most {spares.warm}")
    return spares
