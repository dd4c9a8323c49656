"""The documentation page: Swagger UI from this host, reading the OpenAPI document of this host.

It needs no exception from the policy of all pages: its template has no inline script or style of its own.
"""

from drf_spectacular.views import SpectacularSwaggerSplitView


class Documentation(SpectacularSwaggerSplitView):
    template_name = "api/docs.html"
