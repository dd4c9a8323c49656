"""`lab cloud …`: what happens to the cloud of a laboratory, from no capacity to a spot warning."""

import os
from dataclasses import asdict
from functools import partial
from typing import Annotated

import typer

from lab.hosts import client, cloud_fleet
from lab.hosts.cloud_control import ask
from lab.hosts.console import seconds, stopped_by_signals, table
from lab.hosts.fleet import read_ports
from lab.hosts.places import read_places
from lab.hosts.topology import REGIONS, Topology, checked

app = typer.Typer(help="Controls the cloud whose instances are hosts.", no_args_is_help=True)
Instance = Annotated[str, typer.Argument(help="Such as i-0123456789abcdef0.")]
Type = Annotated[str, typer.Argument(help="Of instances, such as trn1.32xlarge.")]
Zone = Annotated[str, typer.Argument(help="Such as us-east-1a.")]
InMarket = Annotated[str, typer.Option(help="on-demand, spot, capacity-block or interruptible-capacity-reservation.")]
Operation = Annotated[str, typer.Argument(help="As AWS calls it, such as RunInstances.")]
Times = Annotated[int, typer.Option(min=1, help="How often.")]
Over = Annotated[bool, typer.Option("--over", help="End this fault.")]


@app.command()
def up(
    detach: Annotated[bool, typer.Option("--detach", help="Return once it is up, and let it run on.")] = False,
    region: Annotated[list[str], typer.Option(help="Their names, as AWS has them.")] = list(REGIONS),  # noqa: B006
    round_trip: Annotated[str, typer.Option(help="Between two regions, or one and the control plane.")] = "60ms",
    ecs: Annotated[bool, typer.Option("--ecs", help="Nodes are tasks of an ECS cluster, on six machines.")] = False,
) -> None:
    """Make a control plane and a cloud, and have it launch a fleet; without --detach until Ctrl-C."""
    places, ports = read_places(), read_ports(os.environ)
    topology = checked(Topology(tuple(region), 1, 0, 0, seconds(round_trip), cloud=True))
    settings, forwards = cloud_fleet.new_settings(), cloud_fleet.forwards(topology, ports)
    cloud_fleet.prepare(places, topology, settings)
    with stopped_by_signals(not detach) as wait:
        client.start(topology, places, forwards, asdict(settings))
        provider = cloud_fleet.ECS if ecs else cloud_fleet.AWS
        running = cloud_fleet.CloudFleet(places, topology, ports, partial(print, flush=True), provider)
        running.bring_up()
        cloud_fleet.show(running, forwards)
        wait()


@app.command()
def status() -> None:
    """How far it is: exit status 0 when every cell is ready, 1 when not."""
    places, ports = read_places(), read_ports(os.environ)
    running = cloud_fleet.CloudFleet(places, client.topology_of(places), ports, print)
    instances()
    missing = running.missing()
    print(missing or "every cell is ready")
    cloud_fleet.show(running, client.forwards_of(places))
    raise typer.Exit(1 if missing else 0)


@app.command()
def instances() -> None:
    """Every instance, and the host that it is."""
    columns = ("instance", "host", "state", "type", "zone", "market", "address", "reason")
    table(tuple(each.upper() for each in columns), [tuple(row[each] for each in columns) for row in ask("instances")])


@app.command()
def tasks() -> None:
    """Every task of ECS, and why it stopped."""
    columns = ("task", "status", "definition", "reason")
    table(tuple(each.upper() for each in columns), [tuple(row[each] for each in columns) for row in ask("tasks")])


@app.command()
def capacity(
    instance_type: Type,
    zone: Zone,
    left: Annotated[int, typer.Option(min=0, help="Machines.")] = 0,
    market: InMarket = "on-demand",
    over: Over = False,
) -> None:
    """So many machines are left of a type in a zone."""
    ask("capacity", instance_type=instance_type, zone=zone, market=market, left=None if over else left)


@app.command()
def quota(
    name: Annotated[str, typer.Argument(help="As Service Quotas spells it: 'Running On-Demand Trn instances'.")],
    vcpus: Annotated[int, typer.Option(min=0, help="How many may run.")] = 0,
    over: Over = False,
) -> None:
    """So many vCPUs may run of a family of types."""
    ask("quota", name=name, vcpus=None if over else vcpus)


@app.command()
def throttle(operation: Operation, times: Times = 1) -> None:
    """The next calls are refused, as there were too many."""
    ask("fault", operation=operation, code="RequestLimitExceeded", times=times)


@app.command()
def refuse(operation: Operation, code: Annotated[str, typer.Argument(help="Of the error.")], times: Times = 1) -> None:
    """The next calls are refused."""
    ask("fault", operation=operation, code=code, times=times)


@app.command("lose-answer")
def lose_answer(operation: Operation, times: Times = 1) -> None:
    """The next calls are carried out, and their answers are lost."""
    ask("fault", operation=operation, when="after", ending="reset", times=times)


@app.command("zone-outage")
def zone_outage(zone: Zone, over: Over = False) -> None:
    """What is asked about a zone is not answered; its machines run on."""
    ask("zone", name=zone, silent=not over)


@app.command("spot-warning")
def spot_warning(instance: Instance) -> None:
    """Two minutes' notice, and the end after them."""
    ask("spot-warning", instance=instance)


@app.command()
def rebalance(instance: Instance) -> None:
    """A higher risk of interruption, and no promise of when."""
    ask("rebalance", instance=instance)


@app.command()
def event(
    instance: Instance,
    code: Annotated[str, typer.Option(help="Of the event.")] = "instance-retirement",
    within: Annotated[str, typer.Option("--in", help="When, such as 10m.")] = "10m",
) -> None:
    """A scheduled event."""
    ask("event", instance=instance, code=code, in_s=seconds(within))


@app.command()
def impaired(instance: Instance, over: Over = False) -> None:
    """Its status checks fail; its host runs on."""
    ask("impaired", instance=instance, impaired=not over)


@app.command()
def terminate(instance: Instance) -> None:
    """Terminate it, as an operator might in AWS's console."""
    ask("terminate", instance=instance)


@app.command()
def pending(lasting: Annotated[str, typer.Argument(help="Such as 30s.")]) -> None:
    """How long instances are pending before they boot."""
    ask("pending", seconds=seconds(lasting))


@app.command()
def heal() -> None:
    """No fault, no outage, no bound of capacity or quota."""
    ask("heal")
