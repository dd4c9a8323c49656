from django.apps import AppConfig


class TrafficConfig(AppConfig):
    name = "traffic"

    def ready(self) -> None:
        """Registers approvals, ingress agents and benchmarks with the packages below."""
        from accounts.services.approval import fleet_action_register
        from fleet.releases.selectors import agent_source_register
        from models_registry.benchmarks.selectors import register_benchmark_targets
        from traffic.region_shares.services.overrides import EVACUATE, FIX_SHARES
        from traffic.routing.selectors import ingress_agents
        from traffic.routing.services.ingress_client import benchmark_describe, benchmark_enter, benchmark_serve

        register_benchmark_targets(describe=benchmark_describe, enter=benchmark_enter, serve=benchmark_serve)
        agent_source_register(ingress_agents)
        fleet_action_register(EVACUATE)
        fleet_action_register(FIX_SHARES)
