"""How states, times and numbers look on every page. Pure formatting: pages bring `now`, and nothing is looked up."""

import json
from datetime import UTC, datetime
from typing import Any

from django import template
from django.utils.html import format_html
from django.utils.safestring import SafeString

from controlplane.kernel.tones import Tone

register = template.Library()

NOTHING = "–"  # noqa: RUF001 - an en dash is what stands for "no value" in a table
THIN_SPACE = "\u202f"


@register.simple_tag
def glyph(tone: str) -> SafeString:
    """The tone's sign, for where its word stands beside it or in a label."""
    return format_html(
        '<svg class="glyph tone-{}" viewBox="0 0 12 12" aria-hidden="true"><use href="#glyph-{}"/></svg>',
        Tone(tone).value,
        Tone(tone).value,
    )


@register.simple_tag
def state(word: str, tone: str) -> SafeString:
    """A state as everybody reads it: glyph and word in the tone's colour."""
    return format_html(
        '<span class="state tone-{}">{}<span>{}</span></span>', Tone(tone).value, glyph(tone), word.replace("_", " ")
    )


@register.simple_tag(takes_context=True)
def ago(context: dict[str, Any], when: datetime | None) -> SafeString | str:
    """`4 s ago`, the absolute time in the title. Pages keep it ticking."""
    return _time(context, when, "ago")


@register.simple_tag(takes_context=True)
def lasting(context: dict[str, Any], since: datetime | None) -> SafeString | str:
    """`4 s`: how long something has been so."""
    return _time(context, since, "for")


def _time(context: dict[str, Any], when: datetime | None, kind: str) -> SafeString | str:
    if not isinstance(when, datetime):
        return NOTHING
    utc = when.astimezone(UTC)
    age = age_words((context["now"] - when).total_seconds())
    return format_html(
        '<time datetime="{}" title="{}" data-age="{}">{}</time>',
        utc.isoformat(),
        utc.strftime("%Y-%m-%d %H:%M:%S UTC"),
        kind,
        f"{age} ago" if kind == "ago" else age,
    )


def age_words(age_s: float) -> str:
    """In the largest unit of which there are two: `90 s`, `12 min`, `30 h`, `5 d`.

    static/dashboard/ages.js says the same in the browser.
    """
    whole_s = max(0, int(age_s))
    for unit, length_s in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if whole_s >= 2 * length_s:
            return f"{whole_s // length_s}{THIN_SPACE}{unit}"
    return f"{whole_s}{THIN_SPACE}s"


def _number(value: object) -> float | None:
    """The number to show, or None: a template turns an attribute of None into empty text."""
    return value if isinstance(value, int | float) else None


@register.filter
def seconds(value: float) -> str:
    """An age in words."""
    return age_words(value)


@register.filter
def count(value: object) -> str:
    """A whole number in groups of three."""
    number = _number(value)
    return NOTHING if number is None else f"{round(number):,}".replace(",", THIN_SPACE)


@register.filter
def rate(value: object) -> str:
    """Per second: whole from 10 upwards, one decimal below."""
    number = _number(value)
    if number is None:
        return NOTHING
    return count(number) if number >= 10 or number == 0 else f"{number:.1f}"


@register.filter
def ms(value: object) -> str:
    """Milliseconds up to 10 s, seconds above."""
    number = _number(value)
    if number is None:
        return NOTHING
    if number >= 10_000:
        return f"{number / 1000:.1f}{THIN_SPACE}s"
    return f"{count(number)}{THIN_SPACE}ms" if number >= 10 else f"{number:.1f}{THIN_SPACE}ms"


@register.filter
def percent(value: object) -> str:
    """Two decimals below 10 %, whole above; a real zero is plain."""
    number = _number(value)
    if number is None:
        return NOTHING
    return f"{number:.0f}{THIN_SPACE}%" if number == 0 or number >= 10 else f"{number:.2f}{THIN_SPACE}%"


@register.filter
def share(value: object) -> str:
    """A share in per cent: whole, and below 1 with a decimal, so that little does not look like nothing."""
    number = _number(value)
    if number is None:
        return NOTHING
    return f"{number:.1f}{THIN_SPACE}%" if 0 < number < 1 else f"{number:.0f}{THIN_SPACE}%"


@register.filter
def one_decimal(value: object) -> str:
    """A quantity that is no count: requests at once."""
    number = _number(value)
    return NOTHING if number is None else f"{number:.1f}".replace("-0.0", "0.0")


@register.filter
def gib(value: object) -> str:
    """Bytes as GiB: one decimal below 10, whole above."""
    number = _number(value)
    if number is None:
        return NOTHING
    return f"{number / 2**30:.{0 if number == 0 or number >= 10 * 2**30 else 1}f}{THIN_SPACE}GiB"


@register.filter
def counters(value: object) -> str:
    """Those of some named counters that are not 0: `sram_ecc_uncorrected 4`; `none` where all are."""
    if not isinstance(value, dict) or not value:
        return NOTHING
    return ", ".join(f"{name} {count(number)}" for name, number in value.items() if number) or "none"


@register.filter
def plain(value: object) -> str:
    """A value of JSON as a person would write it: text bare, all else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


@register.filter
def short_digest(value: str) -> str:
    """`sha256:0f343b0931126a20…` -> `0f343b093112`."""
    return value.rpartition(":")[2][:12] or NOTHING


@register.filter
def distance(levels: int | None) -> str:
    """How far a follower is from its leader in the network topology, in words."""
    if levels is None:
        return "topology unknown"
    if levels == 0:
        return "same network node"
    return "1 level apart" if levels == 1 else f"{levels} levels apart"
