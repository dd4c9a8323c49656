"""The list of rollouts and the page of one rollout."""

from django.http import Http404

from controlplane.dashboard.charts import Chart
from controlplane.dashboard.fragments import Asked, Choice, Filter, Fragment, Page
from controlplane.dashboard.selectors.cells import CellList, cells_of
from controlplane.dashboard.selectors.events import EventList, rollout_events
from controlplane.dashboard.selectors.rollout_charts import rollout_charts
from controlplane.dashboard.selectors.rollouts import RolloutDetail, RolloutList, rollout_find, rollout_list
from fleet.planning.states import RolloutState, choices

EVENTS_OF_ONE_ROLLOUT = 100


def _list(asked: Asked) -> RolloutList:
    return rollout_list(state=asked.word("state"), text=asked.word("q"))


def _filter(asked: Asked) -> Filter:
    options = (("", "all"), ("active", "active"), *choices(RolloutState))
    state = Choice(name="state", label="state", options=options, chosen=asked.word("state"))
    return Filter(text_label="Find by deployment or words", text_name="q", text=asked.word("q"), choices=(state,))


def _rollout(asked: Asked) -> RolloutDetail:
    detail = rollout_find(asked.key)
    if detail is None:
        raise Http404(f"There is no rollout {asked.key!r}.")
    return detail


def _charts(asked: Asked) -> tuple[Chart, ...]:
    return rollout_charts(asked.once(_rollout).rollout, asked.now)


def _cells(asked: Asked) -> CellList:
    return cells_of(asked.once(_rollout).rollout.deployment_id, asked.now)


def _events(asked: Asked) -> EventList:
    return rollout_events(asked.once(_rollout).rollout, EVENTS_OF_ONE_ROLLOUT)


ROLLOUTS = Page(
    section="rollouts",
    title="Rollouts",
    fragments=(Fragment("rollouts-table", "", ("rollouts",), "dashboard/rollouts/table.html", _list),),
    narrow=_filter,
)

ROLLOUT = Page(
    section="rollouts",
    title="",
    charts=True,
    fragments=(
        Fragment("rollout", "", ("rollouts:{key}", "cells"), "dashboard/rollouts/rollout.html", _rollout),
        Fragment("rollout-asks", "What you can do", ("rollouts:{key}",), "dashboard/rollouts/asks.html", _rollout),
        Fragment(
            "rollout-charts", "New version and old", ("rollouts:{key}",), "dashboard/charts/several.html", _charts
        ),
        Fragment("rollout-cells", "Cells", ("cells", "load"), "dashboard/cells/table.html", _cells),
        Fragment("rollout-events", "Events", ("events",), "dashboard/events/list.html", _events),
    ),
)
