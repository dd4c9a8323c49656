from django.apps import AppConfig


class TrafficConfig(AppConfig):
    name = "traffic"

    def ready(self) -> None:
        """Tell approvals, which lie below traffic, what may take two people."""
        from accounts.services.approval import fleet_action_register
        from traffic.services.override import EVACUATE

        fleet_action_register(EVACUATE)
