"""Hidden fields of every form that posts: they prevent requests from other sites, a second execution of the
same form, and overwriting values that changed while it was open. Available in all templates without `load`."""

import json
import secrets
from collections.abc import Mapping
from typing import Any

from django import template
from django.utils.html import format_html
from django.utils.safestring import SafeString

from kernel import clock
from kernel.rest.idempotency import SUBMISSION

register = template.Library()
TOKEN_BYTES = 9


@register.simple_tag(takes_context=True)
def form_token(context: dict[str, Any]) -> SafeString:
    """The CSRF token, and a token of this form as it was rendered: audit.middleware carries it out once."""
    return format_html(
        '<input type="hidden" name="csrfmiddlewaretoken" value="{}"><input type="hidden" name="{}" value="{}">',
        context.get("csrf_token", ""),
        SUBMISSION,
        secrets.token_urlsafe(TOKEN_BYTES),
    )


@register.simple_tag
def seen(**values: object) -> SafeString:
    """The stored values that a form shows, by field, such as `{% seen role=row.role %}`: `Action.present` has those at
    the time of the submission."""
    return format_html('<input type="hidden" name="seen" value="{}">', seen_text(values))


@register.simple_tag
def opened() -> SafeString:
    """The time of the page, for a form whose fields choose the object: `refuse_newer` compares it with the object's."""
    return format_html('<input type="hidden" name="opened" value="{}">', clock.now().isoformat())


def seen_text(values: Mapping[str, object]) -> str:
    return json.dumps({name: "" if value is None else str(value) for name, value in values.items()})
