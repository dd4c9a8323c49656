from django.apps import AppConfig


class FleetConfig(AppConfig):
    name = "fleet"

    def ready(self) -> None:
        """Answer what lies below the fleet and cannot ask it by itself: the model registry, and approvals."""
        from accounts.services.approval import fleet_action_register
        from fleet.selectors.version_uses import machines_known, version_uses
        from fleet.services.rollout_request import ROLL_OUT
        from models_registry.selectors.fleet_hooks import register_fleet_hooks

        fleet_action_register(ROLL_OUT)
        register_fleet_hooks(uses=version_uses, machines=machines_known)
