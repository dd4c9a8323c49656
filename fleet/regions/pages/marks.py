"""The nodes of a region's tree, as text: a template would take most of the page's time for hundreds of nodes."""

from collections.abc import Iterable

from django import template
from django.utils.html import escape
from django.utils.safestring import SafeString, mark_safe

from controlplane.dashboard.templatetags.switchyard import glyph, link, state
from fleet.regions.pages.views import Mark, Marks

register = template.Library()


@register.simple_tag
def marks(groups: Iterable[Marks]) -> SafeString:
    """Cells with their nodes as squares."""
    found = "".join(f'<div class="marks-of">{_nodes(group)}{_name(group)}</div>' for group in groups)
    return mark_safe(f'<div class="marks">{found}</div>')  # noqa: S308 - names are escaped


def _nodes(group: Marks) -> str:
    label = f"Nodes of {escape(group.cell.pk)}" if group.cell else "Spare nodes"
    return f'<ul class="squares" aria-label="{label}">{"".join(map(_node, group.marks))}</ul>'


def _node(mark: Mark) -> str:
    node, tone, name, text = mark.node, mark.tone.value, escape(mark.node.pk), escape(mark.text)
    return (
        f'<li><a id="place-{name}" class="square tone-{tone}" href="{escape(link("node", node.pk))}"'
        f' title="{name}: {text}" aria-label="{name} {text}" data-watch="{escape(node.state)}">{glyph(tone)}</a></li>'
    )


def _name(group: Marks) -> str:
    if group.cell is None:
        return '<span class="quiet">in no cell</span>'
    name = group.cell.pk
    return (
        f'<a class="marks-name" href="{escape(link("cell", name))}">{escape(name)}</a>'
        f"{state(group.cell.state, group.cell.tone)}"
    )
