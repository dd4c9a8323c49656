from django.apps import AppConfig


class FleetConfig(AppConfig):
    name = "fleet"

    def ready(self) -> None:
        """Register the functions that packages below call: the model registry, and approvals."""
        from accounts.services.approval import approval_listen, fleet_action_register
        from fleet.deployments.selectors import instance_type_uses, version_uses
        from fleet.deployments.services.deployments import EMPTY_BY_SCALING
        from fleet.rollouts.services import ROLL_OUT
        from fleet.webhooks.services import approval_notify
        from models_registry.instance_types.selectors import register_type_uses
        from models_registry.versions.selectors import register_version_uses

        fleet_action_register(ROLL_OUT)
        fleet_action_register(EMPTY_BY_SCALING)
        approval_listen(approval_notify)
        register_version_uses(version_uses)
        register_type_uses(instance_type_uses)
