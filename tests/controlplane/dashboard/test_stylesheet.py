"""The look in numbers: every tone is readable on every ground, in light and in dark (WCAG 2.1 AA: 4.5 to 1)."""

import re
from itertools import product
from pathlib import Path

from kernel.tones import Tone

STATIC = Path(__file__).parents[3] / "controlplane/dashboard/static/dashboard"
CSS = (STATIC / "console.css").read_text()
TOKENS = {
    name: (light, dark)
    for name, light, dark in re.findall(r"--([\w-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\)", CSS)
}
TEXT = ("ink", "ink-quiet", *Tone)
GROUND = ("canvas", "side", "raised")


def luminance(colour: str) -> float:
    """Relative luminance of WCAG 2.1."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def test_text_is_readable() -> None:
    contrasts = {
        (text, ground, ("light", "dark")[theme]): contrast(TOKENS[text][theme], TOKENS[ground][theme])
        for text, ground, theme in product(TEXT, GROUND, (0, 1))
    }
    assert not {what: ratio for what, ratio in contrasts.items() if ratio < 4.5}


def test_every_tone_has_a_class_and_a_glyph() -> None:
    glyphs = (Path(__file__).parents[3] / "templates/dashboard/parts/glyphs.html").read_text()
    assert not [tone for tone in Tone if f".tone-{tone} {{" not in CSS]
    assert not [tone for tone in Tone if f'id="glyph-{tone}"' not in glyphs]


def test_colours_come_from_tokens_only() -> None:
    rules = CSS.split("/* --- ground")[1]
    assert re.findall(r"#[0-9a-fA-F]{3,8}\b", rules) == []
    assert "box-shadow" not in CSS
