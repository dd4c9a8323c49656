"""Every URL that web answers, except the two WebSockets (controlplane.asgi)."""

from django.urls import URLPattern, URLResolver, include, path

from controlplane.admin import record_site
from controlplane.observability.views import Metrics, healthz
from fleet.agents.api import files, joining
from fleet.nodes.api import enrol
from traffic.batches import api as batch
from traffic.files import api as stored_file
from traffic.usage.api.usage import own_errors, own_usage

urlpatterns: list[URLPattern | URLResolver] = [
    path("api/", include("controlplane.api.urls")),
    path("admin/", record_site().urls),
    path("agents/enrol", enrol, name="agents-enrol"),
    path("agents/join/archive/<str:tag>", joining.archive, name="join-archive"),
    path("agents/builds/<str:digest>/<str:name>", files.build, name="agent-build"),
    path("agents/artifacts/<str:digest>", files.artifact, name="agent-artifact-sizes"),
    path("agents/artifacts/<str:digest>/<path:name>", files.artifact, name="agent-artifact"),
    path("agents/holders/<str:digest>", files.holders, name="agent-holders"),
    path("agents/caches/<str:key>", files.compile_cache, name="agent-cache"),
    path("agents/caches/<str:key>/archive", files.cache_archive, name="agent-cache-archive"),
    path("agents/releases/<str:release>/<str:digest>", joining.release, name="agent-release"),
    path("agents/join/check", joining.check, name="join-check"),
    path("agents/join/refused", joining.refused, name="join-refused"),
    path("agents/join/attest", joining.attest, name="join-attest"),
    path("join", joining.script, name="join"),
    path("join/aws", joining.aws_script, name="join-aws"),
    path("healthz", healthz, name="healthz"),
    path("metrics", Metrics.as_view(), name="metrics"),
    path("v1/async/", include("traffic.async_requests.api")),
    path("v1/responses/", include("traffic.responses.api")),
    path("v1/files", stored_file.files, name="files"),
    path("v1/files/", include("traffic.files.api")),
    path("v1/batches", batch.batches, name="batches"),
    path("v1/batches/", include("traffic.batches.api")),
    path("v1/usage", own_usage, name="own-usage"),
    path("v1/usage/errors", own_errors, name="own-errors"),
    path("", include("controlplane.dashboard.urls")),
]
handler400 = "controlplane.borders.answer_bad_request"
handler404 = "controlplane.borders.answer_not_found"
handler500 = "controlplane.borders.answer_fault"
