"""Reads a JSON object of a model version field by field, and says exactly which field has which wrong value.

It knows types and ranges; what values mean together is for the modules that use it.
"""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any


class InvalidVersion(ValueError):
    """A version that cannot be rendered; the text names field, value and rule."""


def one_of(names: Iterable[str], wrong: str) -> str:
    """`it must be one of a, b (did you mean b?)` for the error about a wrong name."""
    known = list(names)
    close = get_close_matches(wrong, known, n=1)
    return f"it must be one of {', '.join(known)}" + (f" (did you mean {close[0]}?)" if close else "")


class FieldReader:
    """One JSON object. Names that are not read are refused by `finish`.

    Args:
        where: what the object is, in errors: `llama@3: speculation`.
        values: the object.

    Raises:
        InvalidVersion: `values` is no object.
    """

    def __init__(self, where: str, values: Any) -> None:
        if not isinstance(values, Mapping):
            raise InvalidVersion(f"{where} is {values!r}; it must be an object")
        self._where = where
        self._values = values
        self._read: list[str] = []

    def wrong(self, name: str, rule: str) -> InvalidVersion:
        """The error that says that this field breaks this rule."""
        return InvalidVersion(f"{self._where}.{name} is {self._values.get(name)!r}; {rule}")

    def wrong_because(self, name: str, reason: str) -> InvalidVersion:
        """The error that says what is wrong inside a field whose value is too long to repeat."""
        return InvalidVersion(f"{self._where}.{name}: {reason}")

    def given(self, name: str) -> Any:
        """The raw value, None where there is none."""
        self._read.append(name)
        return self._values.get(name)

    def whole(self, name: str, *, default: int | None = None) -> int:
        """A whole number from 1; without a default it is required."""
        value = self.given(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.wrong(name, "it must be a whole number from 1")
        return value

    def number(self, name: str, *, least: float, most: float, default: float) -> float:
        """A number from `least` to `most`."""
        value = self.given(name)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
            raise self.wrong(name, f"it must be a number from {least:g} to {most:g}")
        return float(value)

    def text(self, name: str, *, default: str | None = None) -> str:
        """A text that is not empty; without a default it is required."""
        value = self.given(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, str) or not value:
            raise self.wrong(name, "it must be a text that is not empty")
        return value

    def choice(self, name: str, choices: Iterable[str], *, default: str | None = None) -> str:
        """One of these texts; without a default it is required."""
        allowed = list(choices)
        value = self.given(name)
        if value is None and default is not None:
            return default
        if value not in allowed:
            raise self.wrong(name, one_of(allowed, str(value)))
        return str(value)

    def flag(self, name: str) -> bool:
        """True or false; unsaid is false."""
        value = self.given(name)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(name, "it must be true or false")
        return bool(value)

    def mapping(self, name: str) -> Mapping[str, Any]:
        value = self.given(name)
        if value is not None and not isinstance(value, Mapping):
            raise self.wrong(name, "it must be an object")
        return value or {}

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of texts; unsaid is empty."""
        value = self.given(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
            raise self.wrong(name, "it must be a list of texts")
        return tuple(value)

    def finish(self) -> None:
        """Refuse names that were not read.

        Raises:
            InvalidVersion: there is one; the text lists those that exist.
        """
        for name in self._values:
            if name not in self._read:
                raise InvalidVersion(f"{self._where} names {name!r}; {one_of(self._read, name)}")
