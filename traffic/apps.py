from django.apps import AppConfig


class TrafficConfig(AppConfig):
    name = "traffic"

    def ready(self) -> None:
        """Register what may need a second approval, and ingresses among the agents; both lie below traffic."""
        from accounts.services.approval import fleet_action_register
        from fleet.selectors.agents import agent_source_register
        from traffic.selectors.ingress import ingress_agents
        from traffic.services.override import EVACUATE, FIX_SHARES

        agent_source_register(ingress_agents)
        fleet_action_register(EVACUATE)
        fleet_action_register(FIX_SHARES)
