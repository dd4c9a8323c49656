"""URLs of the pages that users open in a browser, and of the actions of their forms."""

from django.contrib.auth.views import LogoutView
from django.urls import path, register_converter
from django.urls.converters import StringConverter

from accounts.views import Login, login_second, oidc_back, oidc_begin
from controlplane.dashboard.events import AUDIT, EVENTS
from controlplane.dashboard.fragments import Page, View, page_view
from controlplane.dashboard.overview import OVERVIEW
from controlplane.dashboard.playground import PLAYGROUND, playground_chat, playground_code
from controlplane.dashboard.settings import second_factor
from controlplane.dashboard.settings import views as settings
from controlplane.dashboard.settings.single_sign_on import identity_provider_remove, identity_provider_try
from controlplane.dashboard.settings.wizards import (
    GROUP_WIZARD,
    PROVIDER_WIZARD,
    USER_WIZARD,
    WEBHOOK_CHANGE_WIZARD,
    WEBHOOK_WIZARD,
)
from controlplane.dashboard.shell import SEARCH, SHELL
from controlplane.dashboard.wizard_pages import wizard_view
from controlplane.dashboard.wizards import Wizard
from fleet.cells.pages.logs import CELL_LOGS, cell_log_download
from fleet.cells.pages.views import CELL, CELLS, cell_action
from fleet.deployments.pages.policies import CHAIN_WIZARD, SCALING_WIZARD, TRAFFIC_WIZARD, UPDATE_WIZARD
from fleet.deployments.pages.views import DAY_PLAN, DEPLOYMENT, DEPLOYMENTS, deployment_scale_page
from fleet.deployments.pages.wizard import DEPLOYMENT_WIZARD
from fleet.drafts.pages.views import (
    PLAN_DRAFT,
    PLAN_DRAFTS,
    plan_draft_action,
    plan_draft_download,
    plan_draft_edit,
    plan_draft_new,
)
from fleet.faults.pages import INCIDENT, INCIDENTS, RUNBOOK, incident_action, incident_report
from fleet.machines.pages.invitations import INVITATION, invitation_withdraw_action, machine_add_action
from fleet.machines.pages.views import MACHINE, MACHINES, machine_action
from fleet.nodes.pages import NODE, NODES, node_action
from fleet.quotas.pages import QUOTA_WIZARD
from fleet.recorder.pages.why import WHY
from fleet.regions.pages.actions import region_action
from fleet.regions.pages.views import (
    REGION,
    REGIONS,
    image_back_action,
    image_move_action,
    pool_action,
    pool_add_action,
)
from fleet.regions.pages.wizard import REGION_WIZARD
from fleet.releases.pages import agents_cancel_action, agents_upgrade_action
from fleet.requests.pages import REQUESTS
from fleet.rollouts.pages.views import ROLLOUT, ROLLOUTS, rollout_action, rollout_new
from models_registry.benchmarks.pages.views import (
    BENCHMARK,
    BENCHMARK_COMPARISON,
    BENCHMARKS,
    benchmark_action,
    benchmark_new,
)
from models_registry.builds.pages import BUILD, engine_build_action, engine_build_new, engine_build_upload_action
from models_registry.builds.pages import UPLOADS as BUILD_UPLOADS
from models_registry.compile_caches.pages import compile_cache_delete
from models_registry.imports.pages import IMPORT, IMPORTS, MODEL_WIZARD, import_action
from models_registry.instance_types.pages import (
    INSTANCE_TYPE,
    INSTANCE_TYPES_PAGE,
    instance_type_action,
    instance_type_new,
)
from models_registry.versions.pages.drafts import DRAFT_WIZARD, VERSION_WIZARD
from models_registry.versions.pages.views import MODEL, MODELS, VERSION, VERSION_DIFF, version_action
from traffic.async_requests.pages import QUEUES
from traffic.batch_schedules.pages import (
    SCHEDULE,
    SCHEDULE_CHANGE_WIZARD,
    SCHEDULE_WIZARD,
    SCHEDULES,
    schedule_action,
)
from traffic.batch_sinks.pages import (
    SINK_CHANGE_WIZARD,
    SINK_WIZARD,
    SINKS,
    delivery_retry,
    sink_delete,
)
from traffic.batches.pages import BATCH, BATCHES, batch_action, batch_download, batch_new
from traffic.keys.pages.tenant import tenant_page
from traffic.keys.pages.views import (
    KEY,
    KEYS,
    key_action,
    key_new,
    keys_require_action,
    tenant_grant_new,
    tenant_grant_withdraw_action,
    tenant_webhook_new,
    tenant_webhook_remove_action,
    tenant_webhook_rotate_action,
)
from traffic.region_shares.pages.views import TRAFFIC, WHAT_IF, evacuate_page, override_end_action, traffic_shares_page
from traffic.usage.pages.cost import COSTS, rate_set_action, rate_withdraw_action
from traffic.usage.pages.usage import USAGE, budget_remove_action, budget_set_action


class ModelName(StringConverter):
    """The name of a model; references of versions never match it."""

    regex = "[^/@]+"


class Reference(StringConverter):
    """`model@version`"""

    regex = "[^/@]+@[^/]+"


register_converter(ModelName, "model")
register_converter(Reference, "version")


def _view(page: Page) -> View:
    return page_view(page, SHELL)


def _wizard(wizard: Wizard) -> View:
    return wizard_view(wizard, SHELL)


urlpatterns = [
    path("", _view(OVERVIEW), name="overview"),
    path("new/model/", _wizard(MODEL_WIZARD), name="model-new"),
    path("new/deployment/", _wizard(DEPLOYMENT_WIZARD), name="deployment-new"),
    path("new/version/", _wizard(VERSION_WIZARD), name="version-new"),
    path("new/quota/", _wizard(QUOTA_WIZARD), name="quota-new"),
    path("new/region/", _wizard(REGION_WIZARD), name="region-new"),
    path("deployments/", _view(DEPLOYMENTS), name="deployments"),
    path("deployments/<str:key>/", _view(DEPLOYMENT), name="deployment"),
    path("deployments/<str:name>/scale/", deployment_scale_page, name="deployment-scale"),
    path("deployments/<str:key>/autoscaling/", _wizard(SCALING_WIZARD), name="deployment-autoscaling"),
    path("deployments/<str:key>/chain/", _wizard(CHAIN_WIZARD), name="deployment-chain"),
    path("deployments/<str:key>/updates/", _wizard(UPDATE_WIZARD), name="deployment-updates"),
    path("deployments/<str:key>/traffic/", _wizard(TRAFFIC_WIZARD), name="deployment-traffic"),
    path("rollouts/", _view(ROLLOUTS), name="rollouts"),
    path("rollouts/new/", rollout_new, name="rollout-new"),
    path("rollouts/<str:key>/", _view(ROLLOUT), name="rollout"),
    path("rollouts/<int:rollout_id>/ask/<str:action>/", rollout_action, name="rollout-action"),
    path("cells/", _view(CELLS), name="cells"),
    path("cells/<str:key>/", _view(CELL), name="cell"),
    path("cells/<str:key>/logs/", _view(CELL_LOGS), name="cell-logs"),
    path("cells/<str:key>/logs/download/", cell_log_download, name="cell-log-download"),
    path("cells/<str:cell_id>/ask/<str:action>/", cell_action, name="cell-action"),
    path("requests/", _view(REQUESTS), name="requests"),
    path("nodes/", _view(NODES), name="nodes"),
    path("nodes/agents/upgrade/", agents_upgrade_action, name="agents-upgrade"),
    path("nodes/agents/cancel/", agents_cancel_action, name="agents-cancel"),
    path("nodes/machines/add/", machine_add_action, name="machine-add"),
    path("invitations/<str:key>/", _view(INVITATION), name="invitation"),
    path("nodes/invitations/<str:prefix>/withdraw/", invitation_withdraw_action, name="invitation-withdraw"),
    path("nodes/<str:key>/", _view(NODE), name="node"),
    path("nodes/<str:node_id>/ask/<str:action>/", node_action, name="node-action"),
    path("instance-types/", _view(INSTANCE_TYPES_PAGE), name="instance-types"),
    path("instance-types/new/", instance_type_new, name="instance-type-new"),
    path("instance-types/<str:key>/", _view(INSTANCE_TYPE), name="instance-type"),
    path("instance-types/<str:key>/ask/<str:action>/", instance_type_action, name="instance-type-action"),
    path("machines/", _view(MACHINES), name="machines"),
    path("machines/<str:key>/", _view(MACHINE), name="machine"),
    path("machines/<str:key>/ask/<str:action>/", machine_action, name="machine-action"),
    path("regions/", _view(REGIONS), name="regions"),
    path("regions/<str:key>/", _view(REGION), name="region"),
    path("regions/<str:region>/ask/<str:action>/", region_action, name="region-action"),
    path("regions/<str:region>/pools/add/", pool_add_action, name="pool-add"),
    path("regions/<str:region>/pools/<int:pool_id>/ask/<str:action>/", pool_action, name="pool-action"),
    path("regions/<str:region>/images/move/", image_move_action, name="image-move"),
    path("regions/<str:region>/images/<int:move_id>/back/", image_back_action, name="image-back"),
    path("traffic/", _view(TRAFFIC), name="traffic"),
    path("what-if/", _view(WHAT_IF), name="what-if"),
    path("traffic/shares/", traffic_shares_page, name="traffic-shares"),
    path("traffic/evacuate/<str:region>/", evacuate_page, name="evacuate"),
    path("traffic/overrides/<int:override_id>/end/", override_end_action, name="override-end"),
    path("playground/", _view(PLAYGROUND), name="playground"),
    path("playground/say/", playground_chat, name="playground-say"),
    path("playground/code/", playground_code, name="playground-code"),
    path("plan/", _view(DAY_PLAN), name="day-plan"),
    path("plan/drafts/", _view(PLAN_DRAFTS), name="plan-drafts"),
    path("plan/drafts/new/", plan_draft_new, name="plan-draft-new"),
    path("plan/drafts/<str:key>/", _view(PLAN_DRAFT), name="plan-draft"),
    path("plan/drafts/<str:key>/edit/", plan_draft_edit, name="plan-draft-edit"),
    path("plan/drafts/<str:key>/download/", plan_draft_download, name="plan-draft-download"),
    path("plan/drafts/<str:key>/ask/<str:action>/", plan_draft_action, name="plan-draft-action"),
    path("batches/", _view(BATCHES), name="batches-page"),
    path("batches/new/", batch_new, name="batch-new"),
    path("batches/schedules/", _view(SCHEDULES), name="batch-schedules"),
    path("batches/schedules/new/", _wizard(SCHEDULE_WIZARD), name="batch-schedule-new"),
    path("batches/schedules/<slug:key>/", _view(SCHEDULE), name="batch-schedule"),
    path("batches/schedules/<slug:key>/change/", _wizard(SCHEDULE_CHANGE_WIZARD), name="batch-schedule-change"),
    path("batches/schedules/<slug:key>/ask/<str:action>/", schedule_action, name="batch-schedule-action"),
    path("batches/sinks/", _view(SINKS), name="batch-sinks"),
    path("batches/sinks/new/", _wizard(SINK_WIZARD), name="batch-sink-new"),
    path("batches/sinks/<slug:key>/change/", _wizard(SINK_CHANGE_WIZARD), name="batch-sink-change"),
    path("batches/sinks/<slug:key>/delete/", sink_delete, name="batch-sink-delete"),
    path("batches/deliveries/<int:key>/continue/", delivery_retry, name="batch-delivery-retry"),
    path("batches/queues/", _view(QUEUES), name="queues"),
    path("batches/<str:key>/", _view(BATCH), name="batch-page"),
    path("batches/<str:key>/<str:name>.jsonl", batch_download, name="batch-download"),
    path("batches/<str:key>/ask/<str:action>/", batch_action, name="batch-action"),
    path("keys/", _view(KEYS), name="keys"),
    path("tenant/", tenant_page, name="tenant"),
    path("keys/new/", key_new, name="key-new"),
    path("keys/require/", keys_require_action, name="keys-require"),
    path("keys/<str:key>/", _view(KEY), name="key"),
    path("keys/<str:key>/ask/<str:action>/", key_action, name="key-action"),
    path("usage/", _view(USAGE), name="usage"),
    path("usage/costs/", _view(COSTS), name="costs"),
    path("usage/costs/rates/set/", rate_set_action, name="rate-set"),
    path("usage/costs/rates/<int:id>/withdraw/", rate_withdraw_action, name="rate-withdraw"),
    path("usage/budgets/set/", budget_set_action, name="budget-set"),
    path("usage/budgets/<int:id>/remove/", budget_remove_action, name="budget-remove"),
    path("benchmarks/", _view(BENCHMARKS), name="benchmarks"),
    path("benchmarks/new/", benchmark_new, name="benchmark-new"),
    path("benchmarks/compare/", _view(BENCHMARK_COMPARISON), name="benchmark-comparison"),
    path("benchmarks/<str:key>/", _view(BENCHMARK), name="benchmark"),
    path("benchmarks/<str:key>/ask/<str:action>/", benchmark_action, name="benchmark-action"),
    path("models/", _view(MODELS), name="models"),
    path("models/<model:key>/", _view(MODEL), name="model"),
    path("models/<version:key>/", _view(VERSION), name="version"),
    path("models/<version:key>/diff/", _view(VERSION_DIFF), name="version-diff"),
    path("models/<version:key>/edit/", _wizard(DRAFT_WIZARD), name="draft-edit"),
    path("compile-caches/<int:id>/delete/", compile_cache_delete, name="compile-cache-delete"),
    path("builds/new/", engine_build_new, name="engine-build-new"),
    path("build-uploads/", _view(BUILD_UPLOADS), name="engine-build-uploads"),
    path("build-uploads/<str:key>/ask/<str:action>/", engine_build_upload_action, name="engine-build-upload-action"),
    path("builds/<str:key>/", _view(BUILD), name="engine-build"),
    path("builds/<str:key>/ask/<str:action>/", engine_build_action, name="engine-build-action"),
    path("models/<version:key>/ask/<str:action>/", version_action, name="version-action"),
    path("imports/", _view(IMPORTS), name="imports"),
    path("imports/<str:key>/", _view(IMPORT), name="import"),
    path("imports/<str:key>/ask/<str:action>/", import_action, name="import-action"),
    path("incidents/", _view(INCIDENTS), name="incidents"),
    path("incidents/<str:key>/", _view(INCIDENT), name="incident"),
    path("incidents/<str:key>/report.md", incident_report, name="incident-report"),
    path("incidents/<int:incident_id>/ask/<str:action>/", incident_action, name="incident-action"),
    path("runbooks/<str:key>/", _view(RUNBOOK), name="runbook"),
    path("why/<str:key>/", _view(WHY), name="why"),
    path("search/", _view(SEARCH), name="search"),
    path("events/", _view(EVENTS), name="events"),
    path("audit/", _view(AUDIT), name="audit"),
    path("settings/", _view(settings.SETTINGS), name="settings"),
    path("settings/users/", _view(settings.USERS), name="settings-users"),
    path("settings/groups/", _view(settings.GROUPS), name="settings-groups"),
    path("settings/approvals/", _view(settings.APPROVALS), name="approvals"),
    path("settings/webhooks/", _view(settings.WEBHOOKS), name="settings-webhooks"),
    path("settings/rules/", _view(settings.FAULT_RULES), name="settings-rules"),
    path("settings/password/", settings.password_change_action, name="password-change"),
    path("settings/second-factor/", second_factor.factors, name="factors"),
    path("settings/second-factor/app/", second_factor.factor_app, name="factor-app"),
    path("settings/second-factor/key/", second_factor.factor_key, name="factor-key"),
    path("settings/second-factor/confirm/", second_factor.factor_confirm, name="factor-confirm"),
    path("settings/second-factor/recovery/", second_factor.recovery_codes_action, name="factor-recovery"),
    path("settings/second-factor/<int:factor_id>/remove/", second_factor.factor_remove_action, name="factor-remove"),
    path("settings/tokens/new/", settings.token_new, name="token-new"),
    path("settings/tokens/<str:prefix>/revoke/", settings.token_revoke_action, name="token-revoke"),
    path("settings/sessions/<int:session_id>/end/", settings.session_end_action, name="session-end"),
    path("settings/users/new/", _wizard(USER_WIZARD), name="user-new"),
    path("settings/users/<str:username>/change/", settings.user_change_action, name="user-change"),
    path("settings/service-accounts/new/", settings.service_account_new, name="program-new"),
    path("settings/groups/new/", _wizard(GROUP_WIZARD), name="group-new"),
    path("settings/single-sign-on/", _view(settings.SINGLE_SIGN_ON), name="settings-single-sign-on"),
    path("settings/single-sign-on/change/", _wizard(PROVIDER_WIZARD), name="single-sign-on-change"),
    path("settings/single-sign-on/try/", identity_provider_try, name="identity-provider-try"),
    path("settings/single-sign-on/remove/", identity_provider_remove, name="identity-provider-remove"),
    path("settings/groups/<str:name>/change/", settings.group_change_action, name="group-change"),
    path("settings/groups/<str:name>/delete/", settings.group_delete_action, name="group-delete"),
    path("settings/grants/new/", settings.grant_new, name="grant-new"),
    path("settings/grants/<int:grant_id>/take/", settings.grant_revoke_action, name="grant-take"),
    path("settings/approvals/<int:approval_id>/approve/", settings.approval_approve_action, name="approval-approve"),
    path("settings/approvals/<int:approval_id>/reject/", settings.approval_reject_action, name="approval-reject"),
    path("settings/approval-rules/<str:name>/", settings.approval_rule_action, name="approval-rule"),
    path("keys/grants/new/", tenant_grant_new, name="tenant-grant-new"),
    path("keys/grants/<int:id>/withdraw/", tenant_grant_withdraw_action, name="tenant-grant-withdraw"),
    path("keys/webhooks/new/", tenant_webhook_new, name="tenant-webhook-new"),
    path("keys/webhooks/<int:id>/rotate/", tenant_webhook_rotate_action, name="tenant-webhook-rotate"),
    path("keys/webhooks/<int:id>/remove/", tenant_webhook_remove_action, name="tenant-webhook-remove"),
    path("settings/allowances/", _view(settings.ALLOWANCES), name="settings-allowances"),
    path("settings/allowances/new/", settings.allowance_new, name="allowance-new"),
    path("settings/allowances/<int:id>/withdraw/", settings.allowance_withdraw_action, name="allowance-withdraw"),
    path("settings/webhooks/new/", _wizard(WEBHOOK_WIZARD), name="webhook-new"),
    path("settings/webhooks/try/", settings.webhook_try_action, name="webhook-try"),
    path("settings/webhooks/<slug:key>/change/", _wizard(WEBHOOK_CHANGE_WIZARD), name="webhook-change"),
    path("settings/webhooks/<slug:name>/test/", settings.webhook_test_action, name="webhook-test"),
    path("settings/webhooks/<slug:name>/rotate/", settings.webhook_rotate_action, name="webhook-rotate"),
    path("settings/webhooks/<slug:name>/switch/", settings.webhook_switch_action, name="webhook-switch"),
    path("settings/webhooks/<slug:name>/delete/", settings.webhook_delete_action, name="webhook-delete"),
    path("settings/rules/<slug:name>/", settings.fault_rule_action, name="fault-rule"),
    path("login/", Login.as_view(), name="login"),
    path("login/second/", login_second, name="login-second"),
    path("login/oidc/", oidc_begin, name="oidc-begin"),
    path("login/oidc/back/", oidc_back, name="oidc-back"),
    path("logout/", LogoutView.as_view(), name="logout"),
]
