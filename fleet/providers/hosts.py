"""What providers share whose machines are hosts of their own: an agent of the machine carries out what is ordered."""

from django.db.models import F

from engine_agent.protocol.states import MachinePhase
from fleet.models import Machine
from fleet.planning.snapshot import ProviderStatus
from fleet.providers.base import ProviderError
from kernel import live


def agent_start_again(machine: Machine | None, node_id: str) -> None:
    """Its machine's agent starts a node's agent again by itself; this says the order again, in case it was lost.

    Raises:
        ProviderError: nobody is there to hear it.
    """
    if machine is None:
        raise ProviderError(f"cannot start the agent of {node_id} again: it has no machine")
    if not machine.connected:
        raise ProviderError(f"cannot start the agent of {node_id} again: {machine.id} is not connected")
    Machine.objects.filter(id=machine.id).update(desired_version=F("desired_version") + 1)
    live.push_desired([machine.id])


def heard_status(machine: Machine) -> ProviderStatus:
    """Of a machine that is connected: what its agent says of the node's."""
    dead = machine.phase == MachinePhase.AGENT_DEAD
    return ProviderStatus.AGENT_DEAD if dead else ProviderStatus.RUNNING
