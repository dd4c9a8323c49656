"""Formats states, times and numbers for every page. It never queries: pages pass `now`."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from decimal import ROUND_DOWN, ROUND_UP, Decimal
from functools import cache, lru_cache
from math import ceil
from typing import Any
from urllib.parse import urlencode

from django import template
from django.http import QueryDict
from django.urls import reverse
from django.utils.html import escape, format_html
from django.utils.safestring import SafeString, mark_safe

from kernel import ages
from kernel.access import Access, Role
from kernel.tones import Tone
from traffic.region_shares.pages.data import MatrixTable, OriginRow

register = template.Library()

NOTHING = "–"  # noqa: RUF001 - an en dash is what stands for "no value" in a table
THIN_SPACE = "\u202f"
STATES_KEPT = 512
"""Cached rendered states of 100 to 200 bytes: a page shows the same few hundreds of times."""
LINKS_KEPT = 20_000
"""At most two megabytes, for the cells and nodes of a large fleet."""


@register.filter
def operates(may: Access, deployment: str | None) -> bool:
    """`{% if may|operates:deployment.name %}`: whether the user may change this deployment."""
    return may.may(Role.OPERATOR, deployment or "")


@register.simple_tag
@cache
def glyph(tone: str) -> SafeString:
    """The tone's glyph, for places that also show its name."""
    return format_html(
        '<svg class="glyph tone-{}" viewBox="0 0 12 12" aria-hidden="true"><use href="#glyph-{}"/></svg>',
        Tone(tone).value,
        Tone(tone).value,
    )


@register.simple_tag
@lru_cache(STATES_KEPT)
def state(name: str, tone: str) -> SafeString:
    """A state: its glyph and its name, in the tone's colour."""
    return format_html(
        '<span class="state tone-{}">{}<span>{}</span></span>', Tone(tone).value, glyph(tone), name.replace("_", " ")
    )


@register.simple_tag
@lru_cache(LINKS_KEPT)
def link(page: str, key: str | int = "") -> str:
    """Same as `url`, but cached: each table row has some, and resolving one costs more than rendering it."""
    return reverse(page, args=(key,) if key != "" else ())


@register.simple_tag(takes_context=True)
def list_query(context: dict[str, Any], body: Any, **changes: object) -> str:
    """The page's query with these parameters of a list: of its first page, unless `page` is one of them."""
    query, prefix = context["request"].GET.copy(), getattr(body, "prefix", "")
    query.pop(f"{prefix}page", None)
    for name, value in changes.items():
        query[f"{prefix}{name}"] = str(value)
    return f"?{query.urlencode()}"


@register.simple_tag(takes_context=True)
def other_parameters(context: dict[str, Any], names: tuple[str, ...]) -> list[tuple[str, str]]:
    """The page's parameters but these, for a form that keeps them."""
    return [(name, value) for name, value in context["request"].GET.items() if name not in names]


@register.simple_tag(takes_context=True)
def ago(context: dict[str, Any], when: datetime | None) -> SafeString | str:
    """The clock time, such as `14:02:11` or `11-29 14:02`, with `4 s ago` as title. Pages keep both up to date, in the
    zone that the reader chose (static/dashboard/ages.js)."""
    return _time(context, when, "ago")


@register.simple_tag(takes_context=True)
def moment(context: dict[str, Any], when: datetime | None) -> SafeString | str:
    """The whole time, such as `2026-11-30 14:02 UTC`, for times that may be far away; its age is the title."""
    return _time(context, when, "at")


@register.simple_tag(takes_context=True)
def lasting(context: dict[str, Any], since: datetime | None) -> SafeString | str:
    """`4 s`: how long something has lasted, with the clock time of its start as title."""
    return _time(context, since, "for")


def _time(context: dict[str, Any], when: datetime | None, kind: str) -> SafeString | str:
    if not isinstance(when, datetime):
        return NOTHING
    when, now = when.astimezone(UTC), context["now"]
    age_s = (now - when).total_seconds()
    age = f"{age_text(age_s)} ago" if age_s >= 0 else f"in {age_text(-age_s)}"
    exact = f"{when:%Y-%m-%d %H:%M:%S} UTC"
    text, title = {
        "ago": (clock_text(when, now), f"{age}, {exact}"),
        "at": (f"{when:%Y-%m-%d %H:%M} UTC", age),
        "for": (age_text(age_s), f"since {exact}"),
    }[kind]
    # Nothing in it needs escaping, and a page has hundreds.
    return mark_safe(  # noqa: S308
        f'<time datetime="{when:%Y-%m-%dT%H:%M:%SZ}" title="{title}" data-age="{kind}">{text}</time>'
    )


def clock_text(when: datetime, now: datetime) -> str:
    """A time in UTC, without the parts that it shares with now: the date today, the year this year."""
    if when.date() == now.date():
        return f"{when:%H:%M:%S}"
    return f"{when:%m-%d %H:%M}" if when.year == now.year else f"{when:%Y-%m-%d %H:%M}"


SPARK_POINTS = 60
"""More are averaged: a sparkline is about a hundred pixels wide."""


@register.simple_tag
def sparkline(values: Sequence[float | None], label: str) -> SafeString:
    """A line without axes, from 0 up, with its range as text. Gaps stay gaps. "" without values."""
    size = max(1, ceil(len(values) / SPARK_POINTS))
    chunks = [[value for value in values[at : at + size] if value is not None] for at in range(0, len(values), size)]
    points = [sum(chunk) / len(chunk) if chunk else None for chunk in chunks]
    known = [point for point in points if point is not None]
    if not known:
        return SafeString("")
    step, top = 100 / max(1, len(points) - 1), max(*known, 1e-9)
    path, pen = [], "M"
    for place, point in enumerate(points):
        if point is not None:
            path.append(f"{pen}{place * step:.1f} {22 - 20 * max(0.0, point) / top:.1f}{'h.01' * (pen == 'M')}")
        pen = "M" if point is None else "L"
    return format_html(
        '<svg class="spark" viewBox="0 0 100 24" preserveAspectRatio="none" role="img" aria-label="{}">'
        '<path d="{}"/></svg>',
        f"{label} in the last hour: {quantity(min(known))} to {quantity(max(known))}",
        "".join(path),
    )


@register.simple_tag
def matrix_fields(row: OriginRow) -> SafeString:
    """A row of a matrix of shares: only numbers, and a large fleet's page has a thousand."""
    return mark_safe(  # noqa: S308
        "".join(
            f'<td class="number heat heat-{field.heat}{" local" if field.is_local else ""}">{share(field.percent)}</td>'
            for field in row.shares
        )
    )


@register.simple_tag
def utilisation_fields(table: MatrixTable) -> SafeString:
    """The last row of a matrix of shares: numbers and fixed texts."""
    cap = f"the cap is {table.cap_percent:.0f} %"
    return mark_safe(  # noqa: S308
        "".join(
            f'<td class="number tone-{used.tone}" title="{used.state}; {cap}">{glyph(used.tone)} {share(used.percent)} '
            f'<span class="quiet wide">{one_decimal(used.load)}/{one_decimal(used.capacity)}</span>'
            f'<span class="unseen"> {used.state}</span></td>'
            for used in table.used
        )
    )


@register.simple_tag
def evacuation_fields(table: MatrixTable) -> SafeString:
    """Links that evacuate a region for the deployment of a matrix of shares."""
    query = escape(urlencode({"deployment": table.deployment}))
    return mark_safe(  # noqa: S308
        "".join(
            f'<td class="number"><a href="{escape(link("evacuate", region))}?{query}">evacuate</a></td>'
            for region in table.regions
        )
    )


def age_text(age_s: float) -> str:
    """The control plane's usual text, with the thin space of pages."""
    return ages.age_text(age_s, THIN_SPACE)


def _number(value: object) -> float | None:
    """The number, or None: a template turns an attribute of None into empty text."""
    return value if isinstance(value, int | float) else None


@register.filter
def seconds(value: float) -> str:
    return age_text(value)


@register.filter
def count(value: object) -> str:
    """A whole number in groups of three digits."""
    number = _number(value)
    return NOTHING if number is None else f"{round(number):,}".replace(",", THIN_SPACE)


@register.filter
def money(value: object) -> str:
    """US dollars in cents, with more decimals for small amounts; exactly zero is plain."""
    if not isinstance(value, Decimal | int):
        return NOTHING
    value = Decimal(value)
    places = 2 if value == 0 or abs(value) >= 1 else 4
    whole, _, part = f"{value:,.{places}f}".partition(".")
    return f"${whole.replace(',', THIN_SPACE)}.{part}"


@register.filter
def used_share(percent: Decimal) -> str:
    """Per cent of a budget: whole, but rounded so that only an exact match shows 100."""
    if percent <= 99 or percent >= 101 or percent == 100:
        return f"{percent:.0f} %"
    return f"{percent.quantize(Decimal('0.1'), ROUND_DOWN if percent < 100 else ROUND_UP)} %"


@register.filter
def pairs(query: QueryDict) -> list[tuple[str, str]]:
    """Names and values. In a template, `query.items` would be the value of a parameter named `items`."""
    return [(name, str(value)) for name, value in query.items()]


@register.filter
def exact(value: Decimal) -> str:
    return f"{value.normalize():f}"


@register.filter
def quantity(value: object) -> str:
    """A measured quantity: whole from 100, below that three significant digits; exactly zero is plain."""
    number = float(value) if isinstance(value, Decimal) else _number(value)
    if number is None:
        return NOTHING
    size = abs(number)
    places = 0 if size >= 100 or size == 0 else 1 if size >= 10 else 2 if size >= 1 else 3 if size >= 0.1 else 4
    return f"{number:,.{places}f}".replace(",", THIN_SPACE)


@register.filter
def rate(value: object) -> str:
    """Per second: whole from 10, one decimal below."""
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
    """Two decimals below 10 %, whole above; exactly zero is plain."""
    number = _number(value)
    if number is None:
        return NOTHING
    return f"{number:.0f}{THIN_SPACE}%" if number == 0 or number >= 10 else f"{number:.2f}{THIN_SPACE}%"


@register.filter
def share(value: object) -> str:
    """A share in per cent: whole, with a decimal below 1, so that small shares are not shown as 0."""
    number = _number(value)
    if number is None:
        return NOTHING
    return f"{number:.1f}{THIN_SPACE}%" if 0 < number < 1 else f"{number:.0f}{THIN_SPACE}%"


@register.filter
def one_decimal(value: object) -> str:
    """A fractional quantity such as concurrent requests."""
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
def size(value: object) -> str:
    """Bytes: as GiB from 10 MiB, else whole bytes."""
    number = _number(value)
    if number is None or number >= 10 * 2**20:
        return NOTHING if number is None else f"{number / 2**30:,.2f}{THIN_SPACE}GiB"
    return f"{number:,.0f}{THIN_SPACE}B"


@register.filter
def counters(value: object) -> str:
    """The counters that are not 0: `sram_ecc_uncorrected 4`; `none` if all are."""
    if not isinstance(value, dict) or not value:
        return NOTHING
    return ", ".join(f"{name} {count(number)}" for name, number in value.items() if number) or "none"


@register.filter
def plain(value: object) -> str:
    """Text without quotes, other values as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


@register.filter
def sentence(text: str) -> str:
    """With a capital, unless it begins with an identifier such as `toy@1`, and with a full stop."""
    first = text.partition(" ")[0]
    capitalised = text[:1].upper() + text[1:] if first.rstrip(":,").isalpha() else text
    return capitalised.rstrip(".") + "."


@register.filter
def short_digest(value: str) -> str:
    """`sha256:0f343b0931126a20…` -> `0f343b093112`."""
    return value.rpartition(":")[2][:12] or NOTHING


@register.filter
def distance(levels: int | None) -> str:
    """Distance of a follower from its leader in the network topology."""
    if levels is None:
        return "topology unknown"
    if levels == 0:
        return "same network node"
    return "1 level apart" if levels == 1 else f"{levels} levels apart"
