from django.apps import AppConfig


class TrafficConfig(AppConfig):
    name = "traffic"

    def ready(self) -> None:
        """Register what packages below need of traffic: second approvals, ingresses among the agents, benchmarks."""
        from accounts.services.approval import fleet_action_register
        from fleet.selectors.agents import agent_source_register
        from models_registry.selectors.benchmark_target import register_benchmark_targets
        from traffic.selectors.ingress import ingress_agents
        from traffic.services.benchmark_target import benchmark_describe, benchmark_enter, benchmark_serve
        from traffic.services.override import EVACUATE, FIX_SHARES

        register_benchmark_targets(describe=benchmark_describe, enter=benchmark_enter, serve=benchmark_serve)
        agent_source_register(ingress_agents)
        fleet_action_register(EVACUATE)
        fleet_action_register(FIX_SHARES)
