from django.apps import AppConfig


class AccountsConfig(AppConfig):
    name = "controlplane.accounts"
    label = "accounts"

    def ready(self) -> None:
        from controlplane.accounts import schema  # noqa: F401 - importing it tells drf-spectacular
