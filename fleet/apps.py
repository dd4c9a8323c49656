from django.apps import AppConfig


class FleetConfig(AppConfig):
    name = "fleet"

    def ready(self) -> None:
        """Register what packages below the fleet need of it: the model registry, and approvals."""
        from accounts.services.approval import fleet_action_register
        from fleet.deployments.selectors import instance_shapes, version_uses
        from fleet.deployments.services.deployments import EMPTY_BY_SCALING
        from fleet.rollouts.services import ROLL_OUT
        from models_registry.versions.selectors import register_fleet_hooks

        fleet_action_register(ROLL_OUT)
        fleet_action_register(EMPTY_BY_SCALING)
        register_fleet_hooks(uses=version_uses, shapes=instance_shapes)
