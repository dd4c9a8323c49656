from django.apps import AppConfig
from django.core.checks import register


class ModelsRegistryConfig(AppConfig):
    name = "models_registry"
    verbose_name = "Model registry"

    def ready(self) -> None:
        """Have the settings checked at start-up; register what may need a second approval."""
        from accounts.services.approval import fleet_action_register
        from models_registry.checks import check_artifact_sources
        from models_registry.services.engine_allowance import WIDEN

        fleet_action_register(WIDEN)
        register(check_artifact_sources)
