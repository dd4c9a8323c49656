"""The paths of near-real-time requests, below /v1/async/."""

from django.urls import path, re_path

from traffic.api.async_request import ENDPOINTS, accept, elsewhere, one

urlpatterns = [
    *(path(kind, accept, {"kind": kind}, name=f"async-{kind}") for kind in ENDPOINTS),
    path("<str:request_id>", one, name="async-request"),
    re_path(r"^", elsewhere),
]
