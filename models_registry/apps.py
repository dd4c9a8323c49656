from django.apps import AppConfig
from django.core.checks import register


class ModelsRegistryConfig(AppConfig):
    name = "models_registry"
    verbose_name = "Model registry"

    def ready(self) -> None:
        """Have the settings checked at start-up."""
        from models_registry.checks import check_artifact_sources

        register(check_artifact_sources)
