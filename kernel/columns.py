"""Checks values against the columns of a table, so that services need not state types and bounds again."""

from typing import Any

from django.core.exceptions import ValidationError
from django.db.models import Model

from kernel.refusals import InvalidInput


def check_columns(model: type[Model], **values: Any) -> None:
    """Raises InvalidInput for the first value that its column's type or validators refuse. None means left out."""
    for name, value in values.items():
        column = model._meta.get_field(name)
        if value is None:
            continue
        try:
            column.clean(value, None)  # type: ignore[union-attr]
        except ValidationError as wrong:
            message = f"{name} is {str(value)[:64]!r}: {' '.join(wrong.messages)}"
            raise InvalidInput(field=name, rule="invalid", message=message) from None
