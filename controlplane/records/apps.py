from django.apps import AppConfig


class RecordsConfig(AppConfig):
    name = "controlplane.records"
    label = "records"
