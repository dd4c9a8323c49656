"""The documentation page: Swagger UI from this host, reading the OpenAPI document of this host."""

from typing import Any

from drf_spectacular.views import SpectacularSwaggerSplitView
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.dashboard.middleware import POLICY

STYLED_POLICY = POLICY.replace("style-src 'self'", "style-src 'self' 'unsafe-inline'")
"""Swagger UI sets styles on its elements. Scripts stay as strict as everywhere: the page starts from its own file."""


class Documentation(SpectacularSwaggerSplitView):
    template_name = "api/docs.html"

    def finalize_response(self, request: Request, response: Response, *args: Any, **kwargs: Any) -> Response:
        answer = super().finalize_response(request, response, *args, **kwargs)
        answer.headers["Content-Security-Policy"] = STYLED_POLICY
        return answer
