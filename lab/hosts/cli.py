"""The command `lab`: real hosts on one machine, and what happens to them."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from lab.hosts import client, cloud_commands, fleet
from lab.hosts.check import Check
from lab.hosts.conditions import Lost
from lab.hosts.console import seconds, share, skew_text, stopped_by_signals, table
from lab.hosts.fleet import read_ports
from lab.hosts.load import MAX_TOKENS
from lab.hosts.places import CHECKOUT, read_places
from lab.hosts.topology import REGIONS, NoLaboratory, Topology, checked
from lab.hosts.trials import Kind, Target, Trial

app = typer.Typer(
    name="lab",
    help="A laboratory of real hosts: network namespaces, each with its own addresses, files and clock.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(cloud_commands.app, name="cloud")
Name = Annotated[str, typer.Argument(help="A host, such as n3, or a region.")]
HostName = Annotated[str, typer.Argument(help="A host, such as n3.")]
OneWay = Annotated[bool, typer.Option("--one-way", help="Only what it sends is lost: it hears and is not heard.")]
Deaf = Annotated[bool, typer.Option("--deaf", help="Only what it should receive is lost: it hears nothing.")]
From = Annotated[str, typer.Option("--from", help="From this host or region alone, control or outside; else from all.")]


@app.command()
def up(
    detach: Annotated[bool, typer.Option("--detach", help="Return once it is up, and let it run on.")] = False,
    nodes: Annotated[int, typer.Option(help="In each region.")] = 4,
    ingresses: Annotated[int, typer.Option(help="In each region.")] = 2,
    controls: Annotated[int, typer.Option(help="Hosts of the control plane.")] = 2,
    region: Annotated[list[str], typer.Option(help="Their names.")] = list(REGIONS),  # noqa: B006
    round_trip: Annotated[str, typer.Option(help="Between two regions, or one and the control plane.")] = "60ms",
    bare: Annotated[bool, typer.Option("--bare", help="Only hosts, no fleet on them.")] = False,
    forward: Annotated[list[str], typer.Option(help="PORT=HOST:PORT: a port of this machine for one of a host.")] = [],  # noqa: B006
) -> None:
    """Make the hosts, boot them, and have them form a fleet; without --detach until Ctrl-C."""
    places, ports = read_places(), read_ports(os.environ)
    topology = Topology(tuple(region), controls, ingresses, nodes, seconds(round_trip))
    forwards = [_forward(text) for text in forward]
    if not bare:
        fleet.install_control_plane(places, checked(topology), Path(sys.executable))
        forwards += [*ports.forwards(topology), *ports.second_dashboard(topology)]
    with stopped_by_signals(not detach) as wait:
        client.start(topology, places, forwards)
        print(f"{len(topology.hosts)} hosts run: lab status, lab exec {next(iter(topology.hosts))} -- sh", flush=True)
        if not bare:
            running = fleet.Fleet(places, topology, ports, say=partial(print, flush=True))
            running.bring_up()
            _show(running, ports.forwards(topology))
        wait()


def _show(running: fleet.Fleet, forwards: list[client.Forward]) -> None:
    print(running.login())
    for each in forwards[1:]:
        print(f"  Ingress    http://127.0.0.1:{each.here}  ({each.host})")


def _forward(text: str) -> client.Forward:
    port, _, target = text.partition("=")
    host, _, there = target.partition(":")
    if not (port.isdecimal() and host and there.isdecimal()):
        raise NoLaboratory(f"--forward {text!r}: give PORT=HOST:PORT, such as 8000=c1:8000.")
    return client.Forward(int(port), host, int(there))


@app.command()
def down(
    wipe: Annotated[bool, typer.Option("--wipe", help="Also remove the files that the hosts wrote.")] = False,
) -> None:
    """End everything, from any state; what hosts wrote stays for the next `up`."""
    ran = client.stop(read_places(), wipe=wipe)
    print("The laboratory has ended." if ran else "No laboratory ran.")


@app.command()
def check() -> None:
    """Judge a fleet that `up` brought up: streamed answers, a power-off that is healed, TLS on every hop."""
    places, ports = read_places(), read_ports(os.environ)
    topology = client.topology_of(places)
    say = partial(print, flush=True)
    running = fleet.Fleet(places, topology, ports, say)
    is_well = Check(places, topology, running, ports.forwards(topology), say).run()
    raise typer.Exit(0 if is_well else 1)


@app.command()
def trial(
    kind: Annotated[Kind, typer.Argument(help="What happens to a host, under streams.")],
    rounds: Annotated[int, typer.Option(min=1, help="How often.")] = 5,
    target: Annotated[list[Target], typer.Option(help="To which hosts; all that it is tried with.")] = [],  # noqa: B006
    rate: Annotated[float, typer.Option(min=0.1, help="Streams a second, in all.")] = 20.0,
    lasting: Annotated[str, typer.Option("--for", help="How long it lasts at least, such as 10m.")] = "20s",
    tokens: Annotated[int, typer.Option(min=1, help="Of each stream; one takes some 25 ms.")] = MAX_TOKENS,
) -> None:
    """Try what a fleet bears: each round says what became of the streams, and how long healing took."""
    places, ports = read_places(), read_ports(os.environ)
    topology = client.topology_of(places)
    say = partial(print, flush=True)
    running = fleet.Fleet(places, topology, ports, say)
    tried = Trial(places, topology, running, ports.forwards(topology), rate, seconds(lasting), say, tokens)
    raise typer.Exit(0 if tried.run(kind, target, rounds) else 1)


@app.command("test", context_settings={"ignore_unknown_options": True})
def run_scenarios(
    arguments: Annotated[list[str] | None, typer.Argument(help="For pytest, such as -k healing.")] = None,
) -> None:
    """Run the scenarios that need only addresses on the fleet that `up` brought up."""
    places = read_places()
    client.topology_of(places)
    command = [sys.executable, "-m", "pytest", "tests/scenarios", "--lab", str(places.home.parent), *(arguments or ())]
    raise typer.Exit(subprocess.run(command, cwd=CHECKOUT, check=False).returncode)


@app.command()
def status(
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Every host: address, power, processes, clock, and what is wrong with its network."""
    seen = client.ask(read_places(), "status")
    if as_json:
        print(json.dumps(seen, indent=2))
        return
    rows = [_host_row(host) for host in seen["hosts"]]
    rows += [("", site, "", "", "", "", "; ".join(wrong)) for site, wrong in seen["sites"].items() if wrong]
    table(("HOST", "SITE", "ADDRESS", "POWER", "PROCESSES", "CLOCK", "NETWORK"), rows)


def _host_row(host: dict[str, Any]) -> tuple[str, ...]:
    power = "on" if host["power"] else "shut down" if host["shut_down"] else "off"
    own = (host["name"], host["site"], host["address"], power, str(host["processes"]))
    return (*own, skew_text(host["ahead_s"]), "; ".join(host["wrong"]))


@app.command()
def cut(name: Name, one_way: OneWay = False, deaf: Deaf = False, other: From = "") -> None:
    """Drop packets silently."""
    if one_way and deaf:
        raise NoLaboratory("Give --one-way or --deaf; without either both ways are cut.")
    lost = Lost.SENT if one_way else Lost.RECEIVED if deaf else Lost.BOTH
    client.ask(read_places(), "cut", name=name, other=other or None, lost=lost)


@app.command()
def slow(
    name: Name,
    delay: Annotated[str, typer.Option(help="Of each packet, each way.")] = "0",
    loss: Annotated[str, typer.Option(help="Share of the packets, each way.")] = "0%",
) -> None:
    """Let packets arrive later, or not at all."""
    client.ask(read_places(), "slow", name=name, delay_s=seconds(delay), loss=share(loss))


@app.command()
def heal(name: Annotated[str, typer.Argument(help="A host or region; without it, all.")] = "") -> None:
    """Undo what `cut` and `slow` did."""
    client.ask(read_places(), "heal", name=name or None)


@app.command("power-off")
def power_off(name: HostName) -> None:
    """Take a host's power: it falls silent, every process of it is gone, its files stay."""
    client.ask(read_places(), "power-off", name=name)


@app.command()
def boot(name: HostName) -> None:
    """Give it power again: it starts what it starts at boot."""
    client.ask(read_places(), "boot", name=name)


@app.command(context_settings={"ignore_unknown_options": True})
def skew(name: HostName, by: Annotated[str, typer.Argument(help="+1h, -10m, or 0 to set it right.")]) -> None:
    """Set a host's clock; its processes see it within a second."""
    client.ask(read_places(), "skew", name=name, seconds=seconds(by))


@app.command("exec", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def execute(name: HostName, command: Annotated[list[str], typer.Argument(help="-- and what to run.")]) -> None:
    """Run a command on a host."""
    given = command[1:] if command[0] == "--" else command
    if not given:
        raise NoLaboratory("Name a command: lab exec n3 -- sh")
    raise typer.Exit(client.run_on(read_places(), name, given))


def main(arguments: list[str] | None = None) -> Any:
    """Run one command; a refusal is one sentence and exit status 1."""
    os.umask(0o022)
    try:
        return app(args=arguments)
    except NoLaboratory as error:
        sys.stderr.write(f"{error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
