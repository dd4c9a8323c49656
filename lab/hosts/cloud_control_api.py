"""What people and trials do to a cloud that runs elsewhere: `POST /cloud/WHAT` with a JSON object.

No call of AWS has such a path without a signature, so that nothing which speaks to AWS comes here."""

import dataclasses
import inspect
import itertools
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any, Protocol

from lab.cloud import ec2_describe
from lab.cloud.ecs_agents import agent_poll, agent_register
from lab.cloud.machines import Machine, Market
from lab.cloud.stack import ECS_IMAGE, container_instances_launch, deploy_base, deploy_cluster, deploy_region
from lab.cloud.wire import Environ
from lab.cloud.world import Ending, Fault, StartResponse, When, World
from lab.hosts.devices import neuron_devices
from lab.hosts.file_tree import START_AT_BOOT
from lab.hosts.topology import Host, NoLaboratory, Role, TemporaryHost

METADATA, TASK_KEYS = IPv4Address("169.254.169.254"), IPv4Address("169.254.170.2")
ENTRYPOINT = Path(__file__).parents[2] / "deploy/images/agent.sh"
FIRST_BOOT = f"{START_AT_BOOT}/00-cloud-init.start"
SHUT_DOWN = "Client.InstanceInitiatedShutdown"
NOT_BOOTED = "Server.InternalError"


class PowerSwitch(Protocol):
    """Hosts that come and go. Each raises `NoLaboratory` where that cannot be."""

    def add(self, added: TemporaryHost) -> None:
        """It has booted when this returns."""

    def remove(self, name: str) -> None:
        """It is gone when this returns, with its files."""

    def restart(self, name: str) -> None:
        """It has booted again, with its files."""


@dataclass
class Running:
    name: str
    reboots: int


class Hypervisor:
    """The hosts of one cloud's instances. `environment`: what each host's processes get. It has one thread."""

    def __init__(self, world: World, power: PowerSwitch, environment: Mapping[str, str]) -> None:
        self._world, self._power, self._environment = world, power, environment
        self._numbers = itertools.count(1)
        self.running: dict[str, Running] = {}
        """By instance."""

    def step(self) -> None:
        with self._world.settled():
            now = self._world.clock.now()
            wanted = {machine.id: machine for machine in self._world.machines if machine.state(now) == "running"}
        # Ended ones first: a new one may get the address of an ended one.
        for machine_id in [each for each in self.running if each not in wanted]:
            self._power.remove(self.running.pop(machine_id).name)
        for machine_id, machine in wanted.items():
            host = self.running.get(machine_id)
            if host is None:
                self._boot(machine)
            elif host.reboots != machine.reboots:
                host.reboots = machine.reboots
                self._power.restart(host.name)

    def _boot(self, machine: Machine) -> None:
        name = f"v{next(self._numbers)}"  # an instance's own name is longer than that of an interface may be
        host = Host(name, Role.TEMPORARY, machine.region, IPv4Address(machine.moto.private_ip_address))
        files = {FIRST_BOOT: Path(__file__).with_name("cloud-init.sh").read_text()}
        devices = neuron_devices(machine.instance_type)
        files |= devices.files
        addresses: tuple[IPv4Address, ...] = (METADATA,)
        if machine.moto.image_id == ECS_IMAGE.id:
            files |= ecs_files()
            addresses = (METADATA, TASK_KEYS)
        efas = sum(each.kind.startswith("efa") for each in machine.interfaces)
        names = (*devices.names, *(f"infiniband/uverbs{index}" for index in range(efas)))
        environment = {**self._environment, **devices.environment}
        self.running[machine.id] = Running(name, machine.reboots)
        try:
            self._power.add(TemporaryHost(host, addresses, environment, files, names))
        except NoLaboratory as error:
            del self.running[machine.id]
            with self._world.settled():
                self._world.machines.end(machine, NOT_BOOTED, str(error))

    def machine_of(self, name: str) -> Machine | None:
        machine_id = next((each for each, host in self.running.items() if host.name == name), "")
        return self._world.machines.get(machine_id)

    def ended(self, name: str, *, by_itself: bool) -> None:
        """A host has no power any more: it shut itself down, which ends the instance, or its hardware failed."""
        machine = self.machine_of(name)
        if machine is None:
            return
        with self._world.settled():
            if by_itself:
                self._world.machines.end(machine, SHUT_DOWN, "Instance initiated shutdown")
            elif machine.impaired_since is None:
                machine.impaired_since = self._world.clock.now()

    def booted(self, name: str) -> Machine | None:
        machine = self.machine_of(name)
        if machine is not None:
            machine.impaired_since = None
        return machine

    def table(self) -> Iterable[dict[str, str]]:
        with self._world.settled():
            now = self._world.clock.now()
            for machine in self._world.machines:
                host = self.running.get(machine.id)
                yield {
                    "instance": machine.id,
                    "host": host.name if host else "",
                    "state": machine.state(now),
                    "type": machine.instance_type,
                    "zone": machine.zone,
                    "market": str(machine.market),
                    "address": str(machine.moto.private_ip_address or ""),
                    "reason": machine.end_reason,
                }


PATH = "/cloud/"
MOST_BYTES = 65536


def ecs_files() -> dict[str, str]:
    """Files of the image for container instances: the ECS agent, which starts at boot, and the entrypoint of tasks."""
    agent = Path(__file__).with_name("ecs_agent.py").read_text()
    return {
        f"{START_AT_BOOT}/10-ecs-agent.start": f"#!/usr/bin/env python3\n{agent}",
        "/usr/local/bin/switchyard-agent": ENTRYPOINT.read_text(),
    }


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
            "deploy-cluster": self.deploy_cluster,
            "register": self.register,
            "agent": self.agent,
            "tasks": self.tasks,
            "age-task": self.age_task,
            "image": self.image,
        }

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if not path.startswith(PATH) or environ.get("HTTP_AUTHORIZATION"):
            return self._world(environ, start_response)
        try:
            status, answer = "200 OK", self._run_command(path.removeprefix(PATH), environ)
        except NoControl as error:
            status, answer = "400 Bad Request", {"error": str(error)}
        start_response(status, [("Content-Type", "application/json")])
        return [json.dumps(answer).encode()]

    def _run_command(self, what: str, environ: Environ) -> dict[str, Any]:
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
        try:
            if todo in (self.deploy, self.deploy_cluster, self.register):
                return {"done": todo(**given)}  # they call AWS themselves, which others must be able to answer
            with self._world.settled():
                return {"done": todo(**given)}
        except LookupError as error:
            raise NoControl(f"{what}: {error}") from None

    def _machine(self, instance: str) -> Machine:
        machine = self._world.machines.get(instance)
        if machine is None:
            raise NoControl(f"There is no instance {instance!r}: `lab cloud instances` lists them.")
        return machine

    # --- what can be done ---------------------------------------------------------------------------------------------

    def instances(self) -> list[dict[str, str]]:
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
            raise NoControl(f"A fault {when!r} {ending!r} {sorted(rest)}: see lab/cloud/world.py.")
        if not (code or ending or rest.get("delay_s")):
            raise NoControl("A fault of nothing: give a code, an ending or a delay.")
        self._world.faults.append(Fault(operation, code, When(when), ending=Ending(ending) if ending else None, **rest))

    def zone(self, name: str, silent: bool) -> None:
        (self._world.silent_zones.add if silent else self._world.silent_zones.discard)(name)

    def spot_warning(self, instance: str) -> None:
        ec2_describe.warn_of_interruption(self._world, self._machine(instance).id)

    def rebalance(self, instance: str) -> None:
        ec2_describe.recommend_rebalance(self._world, self._machine(instance).id)

    def event(self, instance: str, code: str, in_s: float) -> None:
        ec2_describe.schedule(self._world, self._machine(instance).id, code, self._world.clock.now() + in_s)

    def impaired(self, instance: str, impaired: bool) -> None:
        self._machine(instance).impaired_since = self._world.clock.now() if impaired else None

    def terminate(self, instance: str) -> None:
        self._world.machines.end(self._machine(instance), "Client.UserInitiatedShutdown", "User initiated shutdown")

    def pending(self, seconds: float) -> None:
        self._world.delays.pending_s = seconds

    def deploy(self, install: str, networks: dict[str, str]) -> dict[str, str]:
        """The stacks of `deploy/aws`: the base, and one for each region, whose network begins with these two numbers.
        Region -> name of its stack."""
        base = deploy_base(self._world, install)
        for region, prefix in networks.items():
            deploy_region(self._world, region, base, NetworkPrefix=prefix, PlainHttp="yes")
        return {region: f"switchyard-{region}" for region in networks}

    def deploy_cluster(
        self, install: str, networks: dict[str, str], machines: dict[str, int], images: dict[str, str]
    ) -> dict[str, str]:
        """As `deploy`, and in each network an ECS cluster with so many container instances of each type. Region -> name
        of the cluster's stack."""
        base = deploy_base(self._world, install)
        stacks = {}
        for region, prefix in networks.items():
            network = deploy_region(self._world, region, base, NetworkPrefix=prefix, PlainHttp="yes")
            stacks[region], cluster = deploy_cluster(self._world, region, base, network, images)
            container_instances_launch(self._world, region, network, cluster, machines)
        return stacks

    def register(self, cluster: str, machine: str) -> str:
        """An ECS agent makes its machine a container instance. Returns its ARN."""
        return agent_register(self._world, cluster, machine)

    def agent(self, instance: str, states: dict[str, dict[str, str]]) -> list[dict[str, Any]]:
        """An ECS agent reports its tasks, and gets those that it is to run."""
        return agent_poll(self._world, instance, states)

    def tasks(self) -> list[dict[str, str]]:
        now = self._world.clock.now()
        return [
            {
                "task": task.arn.rpartition("/")[2],
                "status": task.status_at(now),
                "instance": task.instance,
                "definition": task.definition.rpartition("/")[2],
                "reason": task.reason,
                **{tag["key"]: tag["value"] for tag in task.tags},
            }
            for task in self._world.tasks.values()
        ]

    def age_task(self, task: str, seconds: float) -> None:
        """A task was started earlier than it was."""
        for arn, each in self._world.tasks.items():
            if arn.endswith(f"/{task}"):
                each.created -= seconds

    def image(self, name: str, missing: bool) -> None:
        """Whether no registry has an image: tasks of it do not start."""
        (self._world.unpullable.add if missing else self._world.unpullable.discard)(name)

    def heal(self) -> None:
        self._world.unpullable.clear()
        self._world.faults.clear()
        self._world.silent_zones.clear()
        self._world.quotas.clear()
        self._world.machines.capacity.free.clear()
