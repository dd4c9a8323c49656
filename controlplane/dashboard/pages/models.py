"""The list of model versions, and the page of one model."""

from django.http import Http404

from controlplane.dashboard.fragments import Asked, Filter, Fragment, Page
from controlplane.dashboard.selectors.models import ModelPage, VersionList, model_find, version_list


def _list(asked: Asked) -> VersionList:
    return version_list(text=asked.word("q"))


def _filter(asked: Asked) -> Filter:
    return Filter(text_label="Find by model, version or engine", text_name="q", text=asked.word("q"))


def _model(asked: Asked) -> ModelPage:
    page = model_find(asked.key)
    if page is None:
        raise Http404(f"There is no model {asked.key!r}.")
    return page


def _versions(asked: Asked) -> VersionList:
    return asked.once(_model).versions


TOPICS = ("models", "deployments", "cells")

MODELS = Page(
    section="models",
    title="Models",
    fragments=(Fragment("versions-table", "", TOPICS, "dashboard/models/table.html", _list),),
    narrow=_filter,
)

MODEL = Page(
    section="models",
    title="",
    fragments=(
        Fragment("model", "", TOPICS, "dashboard/models/model.html", _model),
        Fragment("model-versions", "Versions", TOPICS, "dashboard/models/table.html", _versions),
    ),
)
