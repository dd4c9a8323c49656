"""Keeps the gRPC gateway of an ingress running while its region serves gRPC."""

from dataclasses import replace
from typing import Final

from engine_agent.ingress.config import CONFIG_FILE, GRPC_SOCKETS
from engine_agent.ingress.desired import DesiredHaproxy
from engine_agent.ingress.haproxy import find_master, is_taken
from engine_agent.ingress.settings import IngressSettings
from engine_agent.ingress.side_process import SideProcess
from engine_agent.protocol.ports import grpc_port, grpc_tls_port

STOP_WITHIN_S: Final = 25.0
"""The gateway gives its calls 20 s."""


class GrpcProcess(SideProcess):
    """At most one gateway per ingress."""

    def __init__(self, settings: IngressSettings) -> None:
        folder = settings.state_dir / GRPC_SOCKETS
        super().__init__(
            settings,
            module="engine_agent.grpc_gateway",
            name="gRPC: its gateway",
            folder=folder,
            place=folder,
            log_file="grpc-gateway.log",
        )

    def follow(self, desired: DesiredHaproxy | None) -> None:
        """One pass for a desired state; without one, the gateway is left alone."""
        if desired is not None:
            self.reconcile(self._wanted(desired))

    async def stop(self, within_s: float = STOP_WITHIN_S) -> None:
        await super().stop(within_s)

    def _wanted(self, desired: DesiredHaproxy) -> tuple[str, ...]:
        """The arguments of the gateway; empty: none should run."""
        if not desired.features.grpc:
            return ()
        return (
            *("--folder", str(self.folder), "--release", self._settings.version),
            *("--max-body-bytes", str(desired.max_body_bytes), "--max-calls", str(self._settings.grpc.calls)),
        )


def without_taken_ports(desired: DesiredHaproxy, settings: IngressSettings) -> DesiredHaproxy:
    """The desired state without gRPC if another process has one of its ports: HAProxy would not start, or would share
    the port with it. The state names the port."""
    config = settings.state_dir / CONFIG_FILE
    if not desired.features.grpc or (find_master(config) is not None and "\nfrontend grpc\n" in config.read_text()):
        return desired
    ports = (grpc_port(settings.port), grpc_tls_port(settings.port))
    taken = next((port for port in ports if is_taken(settings.host, port)), None)
    if taken is None:
        return desired
    reason = f"gRPC: {settings.host}:{taken} is in use: stop the process that listens there (`ss -ltnp` names it)"
    features = replace(desired.features, grpc=False)
    return replace(desired, features=features, left_out=(*desired.left_out, reason))
