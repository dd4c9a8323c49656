import warnings

from django.apps import AppConfig


class DashboardConfig(AppConfig):
    name = "controlplane.dashboard"
    label = "dashboard"

    def ready(self) -> None:
        # WhiteNoise hands out files as synchronous streams; under ASGI Django then reads each in a thread, which is
        # right for a few small files, and its warning in the log calls for no action.
        warnings.filterwarnings("ignore", message="StreamingHttpResponse must consume synchronous iterators")
