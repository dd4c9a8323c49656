import gc

from django.apps import AppConfig

COLLECTED_AFTER = (5_000, 10, 50)
"""With Python's default (700, 10, 10) web spends a tenth of its CPU time on scanning all its objects while thousands of
agents connect. References free nearly everything without a collection."""


class ControlplaneConfig(AppConfig):
    """Holds the management commands that reach across the apps, and makes the Celery application the current one."""

    name = "controlplane"

    def ready(self) -> None:
        from controlplane import celery  # noqa: F401 - from here on `celery.current_app` is ours
        from controlplane.observability import signals  # noqa: F401 - from here on tasks are numbered and counted

        gc.set_threshold(*COLLECTED_AFTER)
        gc.enable()
