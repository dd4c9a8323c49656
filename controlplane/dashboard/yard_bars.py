"""The yard map of a large fleet, as text: a template would take most of the page's time for a hundred lines."""

from collections.abc import Iterable
from urllib.parse import urlencode

from django import template
from django.utils.html import escape
from django.utils.safestring import SafeString, mark_safe

from controlplane.dashboard.templatetags.switchyard import glyph, link
from controlplane.dashboard.yard_map import YardLine

register = template.Library()
MISSING = "wanted, not placed yet"
_UNSEEN = f'<span class="unseen">{MISSING}</span>'


@register.simple_tag
def yard_bars(lines: Iterable[YardLine], region: str) -> SafeString:
    """The lines of a region as bars."""
    return mark_safe("".join(_line(line, region) for line in lines))  # noqa: S308 - names are escaped


def _line(line: YardLine, region: str) -> str:
    name, label = escape(line.deployment), f"Cells of {escape(line.deployment)} in {escape(region)}"
    return (
        '<div class="map-line">'
        f'<a class="map-name" href="{escape(link("deployment", line.deployment))}">{name}</a>'
        f"{_bar_line(line, region, label) if line.segments else _missing(line, label)}"
        f'<span class="number" title="ready cells of those wanted">{line.share.ready}/{line.share.wanted}</span></div>'
    )


def _bar_line(line: YardLine, region: str, label: str) -> str:
    cells = f"{link('cells')}?{escape(urlencode({'deployment': line.deployment, 'region': region}))}"
    troubles = "".join(
        f'<span class="state tone-{tone.value}">{glyph(tone.value)}<span>{number} {escape(state)}</span></span>'
        for state, tone, number in line.troubles
    )
    return (
        f'<div class="bar-line"><a href="{cells}" aria-label="{label}">'
        f'<svg class="bar" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">{_bar(line)}</svg>'
        f"</a>{troubles}{_worst(line)}</div>"
    )


def _missing(line: YardLine, label: str) -> str:
    squares = "".join(f'<li><span class="square missing" title="{MISSING}">{_UNSEEN}</span></li>' for _ in line.missing)
    return f'<ul class="squares" aria-label="{label}">{squares}</ul>'


def _bar(line: YardLine) -> str:
    return "".join(
        f'<rect class="tone-{one.tone.value} level-{one.level}" x="{one.start}" width="{one.width}" height="8"></rect>'
        for one in line.segments
    )


def _worst(line: YardLine) -> str:
    if line.worst is None:
        return ""
    cell = line.worst.cell.id
    return (
        f'<a class="quiet" href="{escape(link("cell", cell))}" title="{escape(cell)}">highest {escape(line.text)}</a>'
    )
