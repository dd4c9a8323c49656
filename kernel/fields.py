"""Columns of tables whose rows are written often."""

from typing import TYPE_CHECKING, Any

from django.db import models

if TYPE_CHECKING:
    _CharField = models.CharField[Any, Any]
else:
    _CharField = models.CharField  # has no type parameters while it runs


class IdField(_CharField):
    """A text key with one index. Django gives each text key a second one, for searches by its beginning, and recognises
    text by the short name of its type."""

    def db_type(self, connection: Any) -> str:
        return f"character varying({self.max_length})"
