import warnings

from django.apps import AppConfig


class DashboardConfig(AppConfig):
    name = "controlplane.dashboard"
    label = "dashboard"

    def ready(self) -> None:
        # WhiteNoise serves files as synchronous streams, which Django reads in a thread under ASGI. That is right for a
        # few small files, so its warning needs no action.
        warnings.filterwarnings("ignore", message="StreamingHttpResponse must consume synchronous iterators")
