from django.apps import AppConfig


class KernelConfig(AppConfig):
    name = "controlplane.kernel"
    label = "kernel"
