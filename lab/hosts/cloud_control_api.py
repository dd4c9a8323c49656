"""What people and trials do to a cloud that runs elsewhere: `POST /cloud/WHAT` with a JSON object.

No call of AWS has such a path without a signature, so that nothing which speaks to AWS comes here.
"""

import dataclasses
import inspect
import json
from collections.abc import Callable, Iterable
from typing import Any

from lab.cloud import ec2_events
from lab.cloud.capacity import Market
from lab.cloud.deployment import deploy_base, deploy_region
from lab.cloud.faults import Ending, Fault, When
from lab.cloud.machines import Machine
from lab.cloud.wire import Environ
from lab.cloud.world import StartResponse, World
from lab.hosts.hypervisor import Hypervisor

PATH = "/cloud/"
MOST_BYTES = 65536


class NoControl(Exception):
    """Why that cannot be done to a cloud, in one sentence."""


class Control:
    """A WSGI application: the cloud's own calls, and these."""

    def __init__(self, world: World, hypervisor: Hypervisor) -> None:
        self._world, self._hypervisor = world, hypervisor
        self._known: dict[str, Callable[..., Any]] = {
            "instances": self.instances,
            "capacity": self.capacity,
            "quota": self.quota,
            "fault": self.fault,
            "zone": self.zone,
            "spot-warning": self.spot_warning,
            "rebalance": self.rebalance,
            "event": self.event,
            "impaired": self.impaired,
            "terminate": self.terminate,
            "pending": self.pending,
            "heal": self.heal,
            "deploy": self.deploy,
        }

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if not path.startswith(PATH) or environ.get("HTTP_AUTHORIZATION"):
            return self._world(environ, start_response)
        try:
            status, answer = "200 OK", self._do(path.removeprefix(PATH), environ)
        except NoControl as error:
            status, answer = "400 Bad Request", {"error": str(error)}
        start_response(status, [("Content-Type", "application/json")])
        return [json.dumps(answer).encode()]

    def _do(self, what: str, environ: Environ) -> dict[str, Any]:
        todo = self._known.get(what)
        if todo is None or environ["REQUEST_METHOD"] != "POST":
            raise NoControl(f"{environ['REQUEST_METHOD']} {what!r}: POST one of {', '.join(self._known)}.")
        try:
            given = json.loads(
                environ["wsgi.input"].read(min(int(environ.get("CONTENT_LENGTH") or 0), MOST_BYTES)) or "{}"
            )
            inspect.signature(todo).bind(**given)
        except (ValueError, TypeError) as error:
            raise NoControl(f"{what}: {error}.") from None
        if todo == self.deploy:  # it makes calls of AWS itself, which others must be able to answer
            return {"done": todo(**given)}
        with self._world.settled():
            return {"done": todo(**given)}

    def _machine(self, instance: str) -> Machine:
        machine = self._world.machines.get(instance)
        if machine is None:
            raise NoControl(f"There is no instance {instance!r}: `lab cloud instances` lists them.")
        return machine

    # --- what can be done ---------------------------------------------------------------------------------------------

    def instances(self) -> list[dict[str, str]]:
        """Every instance, and the host that it is."""
        return list(self._hypervisor.table())

    def capacity(self, instance_type: str, zone: str, market: str, left: int | None) -> None:
        """So many machines of a type are left in a zone; None: plenty."""
        if market not in list(Market):
            raise NoControl(f"Market {market!r}: give one of {', '.join(Market)}.")
        free, key = self._world.machines.capacity.free, (instance_type, zone, Market(market))
        free.pop(key, None)
        if left is not None:
            free[key] = left

    def quota(self, name: str, vcpus: int | None) -> None:
        """So many vCPUs may run of a family; None: as many as you like. `name`: as Service Quotas spells it."""
        self._world.quotas.pop(name, None)
        if vcpus is not None:
            self._world.quotas[name] = vcpus

    def fault(self, operation: str, code: str = "", when: str = "before", ending: str = "", **rest: Any) -> None:
        """The next `times` calls of an operation fail: with an error, late, or without an answer."""
        allowed = {field.name for field in dataclasses.fields(Fault)}
        if when not in list(When) or ending not in ("", *Ending) or not set(rest) <= allowed:
            raise NoControl(f"A fault {when!r} {ending!r} {sorted(rest)}: see lab/cloud/faults.py.")
        if not (code or ending or rest.get("delay_s")):
            raise NoControl("A fault of nothing: give a code, an ending or a delay.")
        self._world.faults.append(Fault(operation, code, When(when), ending=Ending(ending) if ending else None, **rest))

    def zone(self, name: str, silent: bool) -> None:
        """A zone answers nothing, or answers again."""
        (self._world.silent_zones.add if silent else self._world.silent_zones.discard)(name)

    def spot_warning(self, instance: str) -> None:
        """Two minutes' notice, and the end after them."""
        ec2_events.warn_of_interruption(self._world, self._machine(instance).id)

    def rebalance(self, instance: str) -> None:
        """A higher risk, and no promise of when."""
        ec2_events.recommend_rebalance(self._world, self._machine(instance).id)

    def event(self, instance: str, code: str, in_s: float) -> None:
        """A scheduled event, such as `instance-retirement`."""
        ec2_events.schedule(self._world, self._machine(instance).id, code, self._world.clock.now() + in_s)

    def impaired(self, instance: str, impaired: bool) -> None:
        """Its status checks fail, or pass again."""
        self._machine(instance).impaired_since = self._world.clock.now() if impaired else None

    def terminate(self, instance: str) -> None:
        self._world.machines.end(self._machine(instance), "Client.UserInitiatedShutdown", "User initiated shutdown")

    def pending(self, seconds: float) -> None:
        """How long an instance is pending before it boots."""
        self._world.delays.pending_s = seconds

    def deploy(self, install: str, networks: dict[str, str]) -> dict[str, str]:
        """The stacks of `deploy/aws`: the base, and one for each region, whose network begins with these two numbers.
        Region -> name of its stack."""
        base = deploy_base(self._world, install)
        for region, prefix in networks.items():
            deploy_region(self._world, region, base, NetworkPrefix=prefix, PlainHttp="yes")
        return {region: f"switchyard-{region}" for region in networks}

    def heal(self) -> None:
        """No fault, no silent zone, no bound of capacity or quota."""
        self._world.faults.clear()
        self._world.silent_zones.clear()
        self._world.quotas.clear()
        self._world.machines.capacity.free.clear()
