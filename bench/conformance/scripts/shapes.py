"""Structured outputs as Pydantic models, and the tool that agents call. Needs Pydantic."""

from typing import Literal

from pydantic import BaseModel

_calls: list[dict[str, str]] = []


class Capital(BaseModel):
    city: str


class Weather(BaseModel):
    city: str
    unit: Literal["celsius", "fahrenheit"]


def weather(city: str, unit: Literal["celsius", "fahrenheit"]) -> str:
    """The weather in a city.

    Args:
        city: The city's name.
        unit: The temperature's unit."""
    _calls.append({"city": city, "unit": unit})
    return f"21 degrees {unit} in {city}"


def last_call() -> dict[str, str]:
    """The arguments of the last call of `weather`. Raises IndexError if there was none."""
    return _calls[-1]
