import gc

from django.apps import AppConfig


class ControlplaneConfig(AppConfig):
    """Holds the management commands that reach across the apps, and makes the Celery application the current one."""

    name = "controlplane"

    def ready(self) -> None:
        from controlplane import celery  # noqa: F401 - from here on `celery.current_app` is ours
        from controlplane.observability import signals  # noqa: F401 - from here on tasks are numbered and counted

        gc.enable()
