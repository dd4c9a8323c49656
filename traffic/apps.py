from django.apps import AppConfig


class TrafficConfig(AppConfig):
    name = "traffic"

    def ready(self) -> None:
        """Register what may need a second approval; approvals lie below traffic."""
        from accounts.services.approval import fleet_action_register
        from traffic.services.override import EVACUATE, FIX_SHARES

        fleet_action_register(EVACUATE)
        fleet_action_register(FIX_SHARES)
