"""`lab cloud …`: what happens to the cloud of a laboratory, from no capacity to a spot warning."""

from typing import Annotated, Any

import httpx
import typer

from bench.lab import client
from bench.lab.places import read_places
from bench.lab.text import seconds, table
from bench.lab.topology import CLOUD, NoLaboratory

ANSWERS_WITHIN_S = 60.0

app = typer.Typer(help="What happens to the cloud whose instances are hosts.", no_args_is_help=True)
Instance = Annotated[str, typer.Argument(help="Such as i-0123456789abcdef0.")]
Type = Annotated[str, typer.Argument(help="Of instances, such as trn1.32xlarge.")]
Zone = Annotated[str, typer.Argument(help="Such as us-east-1a.")]
InMarket = Annotated[str, typer.Option(help="on-demand, spot, capacity-block or interruptible-capacity-reservation.")]
Operation = Annotated[str, typer.Argument(help="As AWS calls it, such as RunInstances.")]
Times = Annotated[int, typer.Option(min=1, help="How often.")]
Over = Annotated[bool, typer.Option("--over", help="It is as before.")]


def url_of_cloud() -> str:
    """On the real host.

    Raises:
        NoLaboratory: none runs, or it has no cloud.
    """
    places = read_places()
    port = next((each.here for each in client.forwards_of(places) if each.host == CLOUD), None)
    if port is None:
        raise NoLaboratory(f"The laboratory in {places.home} has no cloud: `make up CLOUD=aws` makes one that has.")
    return f"http://127.0.0.1:{port}"


def ask(what: str, **given: Any) -> Any:
    """Have the cloud do something.

    Raises:
        NoLaboratory: it does not answer, or refuses: why.
    """
    try:
        answer = httpx.post(f"{url_of_cloud()}/cloud/{what}", json=given, timeout=ANSWERS_WITHIN_S).json()
    except (httpx.HTTPError, ValueError) as error:
        raise NoLaboratory(f"The cloud does not answer: {error!r}.") from None
    if "error" in answer:
        raise NoLaboratory(answer["error"])
    return answer["done"]


@app.command()
def instances() -> None:
    """Every instance, and the host that it is."""
    columns = ("instance", "host", "state", "type", "zone", "market", "address", "reason")
    table(tuple(each.upper() for each in columns), [tuple(row[each] for each in columns) for row in ask("instances")])


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
    """End it, as somebody might in AWS's console."""
    ask("terminate", instance=instance)


@app.command()
def pending(lasting: Annotated[str, typer.Argument(help="Such as 30s.")]) -> None:
    """How long instances are pending before they boot."""
    ask("pending", seconds=seconds(lasting))


@app.command()
def heal() -> None:
    """No fault, no outage, no bound of capacity or quota."""
    ask("heal")
