from django.apps import AppConfig


class FleetConfig(AppConfig):
    name = "fleet"

    def ready(self) -> None:
        """Answer the model registry, which lies below the fleet and cannot ask it by itself."""
        from fleet.selectors.version_uses import machines_known, version_uses
        from models_registry.selectors.fleet_answers import fleet_registers

        fleet_registers(uses=version_uses, machines=machines_known)
