"""The six ways in which a thing can feel to an operator."""

from enum import StrEnum


class Tone(StrEnum):
    """How a state or an event feels. Screens give each tone one colour and one glyph."""

    OK = "ok"
    MOVING = "moving"
    WARN = "warn"
    BAD = "bad"
    IDLE = "idle"
    BAKE = "bake"
