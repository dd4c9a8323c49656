"""What filters of the fleet's lists have in common."""

from typing import Any, ClassVar

from django.db.models import QuerySet
from django_filters import rest_framework as filters

ALL = "all"


class EndedHidden(filters.FilterSet):
    """Leaves out what has ended, which would soon outnumber the rest, unless `state` or `include=all` selects it."""

    ended: ClassVar[str]

    include = filters.ChoiceFilter(
        choices=[(ALL, "All")], method="keep", help_text="`all`: with those that have ended, which are left out else."
    )

    def keep(self, queryset: QuerySet[Any], name: str, value: str) -> QuerySet[Any]:
        return queryset

    def filter_queryset(self, queryset: QuerySet[Any]) -> QuerySet[Any]:
        options = self.form.cleaned_data
        chosen: QuerySet[Any] = super().filter_queryset(queryset)
        return chosen if options["state"] or options["include"] else chosen.exclude(state=self.ended)
