"""The pages that people open in a browser."""

from django.contrib.auth.views import LogoutView
from django.urls import path, register_converter
from django.urls.converters import StringConverter

from accounts.views import Login, oidc_back, oidc_begin
from controlplane.dashboard.fragments import Page, View, page_view
from controlplane.dashboard.pages.audit import AUDIT
from controlplane.dashboard.pages.cell_actions import cell_action
from controlplane.dashboard.pages.cells import CELL, CELLS
from controlplane.dashboard.pages.deployment_scale import scale as deployment_scale
from controlplane.dashboard.pages.deployments import DEPLOYMENT, DEPLOYMENTS
from controlplane.dashboard.pages.draft_actions import draft_edit, draft_new
from controlplane.dashboard.pages.events import EVENTS
from controlplane.dashboard.pages.incidents import INCIDENT, INCIDENTS
from controlplane.dashboard.pages.key_actions import key_action, key_new, keys_require_ask
from controlplane.dashboard.pages.keys import KEY, KEYS
from controlplane.dashboard.pages.models import MODEL, MODELS
from controlplane.dashboard.pages.nodes import NODE, NODES
from controlplane.dashboard.pages.overview import OVERVIEW
from controlplane.dashboard.pages.playground import PLAYGROUND, playground_say
from controlplane.dashboard.pages.rollout_actions import rollout_action
from controlplane.dashboard.pages.rollout_new import rollout_new
from controlplane.dashboard.pages.rollouts import ROLLOUT, ROLLOUTS
from controlplane.dashboard.pages.search import SEARCH
from controlplane.dashboard.pages.shell import SHELL
from controlplane.dashboard.pages.traffic import TRAFFIC
from controlplane.dashboard.pages.traffic_actions import evacuate, override_end_now
from controlplane.dashboard.pages.traffic_shares import traffic_shares
from controlplane.dashboard.pages.version_actions import version_action
from controlplane.dashboard.pages.versions import VERSION, VERSION_DIFF
from controlplane.dashboard.settings_urls import settings_urlpatterns


class ModelName(StringConverter):
    """The name of a model, which no version's reference looks like."""

    regex = "[^/@]+"


class Reference(StringConverter):
    """`model@version`"""

    regex = "[^/@]+@[^/]+"


register_converter(ModelName, "model")
register_converter(Reference, "version")


def _view(page: Page) -> View:
    return page_view(page, SHELL)


urlpatterns = [
    path("", _view(OVERVIEW), name="overview"),
    path("deployments/", _view(DEPLOYMENTS), name="deployments"),
    path("deployments/<str:key>/", _view(DEPLOYMENT), name="deployment"),
    path("deployments/<str:name>/scale/", deployment_scale, name="deployment-scale"),
    path("rollouts/", _view(ROLLOUTS), name="rollouts"),
    path("rollouts/new/", rollout_new, name="rollout-new"),
    path("rollouts/<str:key>/", _view(ROLLOUT), name="rollout"),
    path("rollouts/<int:rollout_id>/ask/<str:action>/", rollout_action, name="rollout-action"),
    path("cells/", _view(CELLS), name="cells"),
    path("cells/<str:key>/", _view(CELL), name="cell"),
    path("cells/<str:cell_id>/ask/<str:action>/", cell_action, name="cell-action"),
    path("nodes/", _view(NODES), name="nodes"),
    path("nodes/<str:key>/", _view(NODE), name="node"),
    path("traffic/", _view(TRAFFIC), name="traffic"),
    path("traffic/shares/", traffic_shares, name="traffic-shares"),
    path("traffic/evacuate/<str:region>/", evacuate, name="evacuate"),
    path("traffic/overrides/<int:override_id>/end/", override_end_now, name="override-end"),
    path("playground/", _view(PLAYGROUND), name="playground"),
    path("playground/say/", playground_say, name="playground-say"),
    path("keys/", _view(KEYS), name="keys"),
    path("keys/new/", key_new, name="key-new"),
    path("keys/require/", keys_require_ask, name="keys-require"),
    path("keys/<str:key>/", _view(KEY), name="key"),
    path("keys/<str:key>/ask/<str:action>/", key_action, name="key-action"),
    path("models/", _view(MODELS), name="models"),
    path("models/<model:key>/", _view(MODEL), name="model"),
    path("models/<version:key>/", _view(VERSION), name="version"),
    path("models/<version:key>/diff/", _view(VERSION_DIFF), name="version-diff"),
    path("models/<version:key>/draft/", draft_new, name="draft-new"),
    path("models/<version:key>/edit/", draft_edit, name="draft-edit"),
    path("models/<version:key>/ask/<str:action>/", version_action, name="version-action"),
    path("incidents/", _view(INCIDENTS), name="incidents"),
    path("incidents/<str:key>/", _view(INCIDENT), name="incident"),
    path("search/", _view(SEARCH), name="search"),
    path("events/", _view(EVENTS), name="events"),
    path("audit/", _view(AUDIT), name="audit"),
    *settings_urlpatterns,
    path("login/", Login.as_view(), name="login"),
    path("login/oidc/", oidc_begin, name="oidc-begin"),
    path("login/oidc/back/", oidc_back, name="oidc-back"),
    path("logout/", LogoutView.as_view(), name="logout"),
]
