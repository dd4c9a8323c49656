"""What a caller may do for one deployment, as templates ask it. Decides nothing: `kernel.access` does."""

from django import template

from kernel.access import Access, Role

register = template.Library()


@register.filter
def operates(may: Access, deployment: str | None) -> bool:
    """`{% if may|operates:deployment.name %}`: whether the caller may change things of this deployment."""
    return may.may(Role.OPERATOR, deployment or "")
