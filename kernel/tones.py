"""The six tones of states and events."""

from enum import StrEnum


class Tone(StrEnum):
    """The tone of a state or an event. Screens give each tone one colour and one glyph."""

    OK = "ok"
    MOVING = "moving"
    WARN = "warn"
    BAD = "bad"
    IDLE = "idle"
    BAKE = "bake"
