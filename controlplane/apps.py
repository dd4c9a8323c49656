from django.apps import AppConfig


class ControlplaneConfig(AppConfig):
    """Holds the management commands that reach across the apps."""

    name = "controlplane"
