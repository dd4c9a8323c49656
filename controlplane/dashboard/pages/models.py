"""The list of model versions."""

from controlplane.dashboard.fragments import Asked, Filter, Fragment, Page
from controlplane.dashboard.selectors.models import VersionList, version_list


def _list(asked: Asked) -> VersionList:
    return version_list(text=asked.word("q"))


def _filter(asked: Asked) -> Filter:
    return Filter(text_label="Find by model, version or engine", text_name="q", text=asked.word("q"))


MODELS = Page(
    section="models",
    title="Models",
    fragments=(Fragment("versions-table", "", ("models", "deployments"), "dashboard/models/table.html", _list),),
    narrow=_filter,
)
