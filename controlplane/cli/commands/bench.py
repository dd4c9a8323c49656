"""Benchmarks: measure a version, follow it, compare results, and apply them."""

import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from controlplane.cli.commands.act import Yes
from controlplane.cli.commands.rollouts import stated
from controlplane.cli.completion import names_of
from controlplane.cli.errors import Failure
from controlplane.cli.exit_codes import ExitCode
from controlplane.cli.resources import Column, at, number
from controlplane.cli.session import Session, session_of

app = typer.Typer()
bench = typer.Typer(
    help="Measure and compare versions. List: switchyard get benchmarks.",
    no_args_is_help=True,
)
app.add_typer(bench, name="bench")

LOOK_EVERY_S = 2.0
OPEN = frozenset({"queued", "running"})
Workload = Annotated[
    str,
    typer.Option(
        "--workload", "-w", help="PROMPT+OUTPUT tokens, mooncake or azure; options follow commas: prefix=512."
    ),
]
Slo = Annotated[
    str, typer.Option("--slo", help="Limits in milliseconds, first token and between tokens: ttft=500,itl=50.")
]
Named = Annotated[int, typer.Argument(metavar="NUMBER", help="ID in `switchyard get benchmarks`.")]
POINTS = (
    number("RATE/S", "rate"), Column("VERDICT", at("verdict")), number("INSIDE", "figures.judged_inside"),
    number("OF", "figures.judged"), number("TTFT P50", "figures.ttft_p50_ms"), number("P99", "figures.ttft_p99_ms"),
    number("ITL P50", "figures.itl_p50_ms"), number("P99", "figures.itl_p99_ms"),
    number("TOKENS/S", "figures.tokens_per_s"), number("CONCURRENCY", "figures.concurrency"),
    number("$/M", "figures.dollars_per_mtoken"), number("J/TOKEN", "figures.joules_per_token"),
)  # fmt: skip


@bench.command("run")
def run_(
    context: typer.Context,
    version: Annotated[str, typer.Argument(metavar="MODEL@VERSION")],
    workload: Workload,
    slo: Slo,
    deployment: Annotated[
        str,
        typer.Option(
            "-d",
            "--deployment",
            help="Deployment that serves it. Default: the model's name.",
            autocompletion=names_of("deployments"),
        ),
    ] = "",
    region: Annotated[str, typer.Option("--region", "-r", help="Region. Default: the deployment's only one.")] = "",
    seed: Annotated[int, typer.Option(min=0, help="Random seed; the same seed gives the same requests.")] = 0,
    first_rate: Annotated[float, typer.Option(help="First rate in requests/s. Default: found by measuring.")] = 0.0,
    rules: Annotated[
        list[str] | None, typer.Option("--rule", help="Length of points: min_s=20, min_requests=100, most_s=…")
    ] = None,
    beside_traffic: Annotated[
        bool,
        typer.Option("--beside-traffic", help="Measure even though its cells serve other traffic, which slows down."),
    ] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Do not wait for the end.")] = False,
) -> None:
    """Find the highest rate at which 99 % of requests meet an objective. The load grows until the cells exceed it.

    switchyard bench run sim-70b@1 --workload 1000+150 --slo ttft=1000,itl=60 --region us-east-1"""
    run = session_of(context)
    body: dict[str, Any] = {
        "version": version,
        "deployment": deployment or version.partition("@")[0],
        "region": region,
        "workload": workload,
        "slo": slo,
        "seed": seed,
        "rules": stated(rules or []),
        "beside_traffic": beside_traffic,
    }
    found = run.connection.post("benchmarks", body | ({"first_rate": first_rate} if first_rate else {}))
    if not detach:
        found = _followed(run, found)
    _show(run, found)
    if found["state"] == "failed":
        raise Failure(found["reason"], ExitCode.CONFLICT)


@bench.command()
def show(
    context: typer.Context,
    benchmark: Named,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until it has ended.")] = False,
) -> None:
    """Show a benchmark: its points, its goodput, and others that measured the same.

    switchyard bench show 7"""
    run = session_of(context)
    found = run.connection.get(f"benchmarks/{benchmark}")
    _show(run, _followed(run, found) if wait else found)


@bench.command()
def cancel(context: typer.Context, benchmark: Named, yes: Yes = False) -> None:
    """Cancel a benchmark that waits or runs; measured points are kept.

    switchyard bench cancel 7"""
    run = session_of(context)
    run.confirm(f"Benchmark {benchmark} will stop before its end.", wanted=str(benchmark), yes=yes)
    _show(run, run.connection.post(f"benchmarks/{benchmark}/cancel", {}))


@bench.command()
def best(
    context: typer.Context,
    workload: Workload,
    slo: Slo,
    instance_type: Annotated[
        str, typer.Option("--type", help="Only this instance type.", autocompletion=names_of("instance-types"))
    ] = "",
    aim: Annotated[str, typer.Option(help="goodput, speed, cost or energy.")] = "goodput",
) -> None:
    """Show the best version and instance type for a use, with the reason.

    switchyard bench best --workload 1000+150 --slo ttft=1000,itl=60 --aim cost"""
    run = session_of(context)
    query = {"workload": workload, "slo": slo, "aim": aim} | ({"instance_type": instance_type} if instance_type else {})
    found = run.connection.get("benchmarks/best", query)
    one = found["best"]
    split = one and one["split"] and f" as {one['split']}"
    told = one and f"{one['version']} on {one['instance_type']}{split}: {one['reason']} (benchmark {one['benchmark']})"
    run.show(found, [told or "Nothing was measured for this use; `switchyard bench run` measures it."])


@bench.command()
def apply(
    context: typer.Context,
    benchmark: Named,
    cost: Annotated[
        bool,
        typer.Option(
            "--cost", help="Also set the token cost of its region relative to others with the same benchmark."
        ),
    ] = False,
    yes: Yes = False,
) -> None:
    """Use a benchmark's result for its deployment: set `tested_concurrency`, which traffic shares, the autoscaler and
    the daily plan use. With --cost also set the relative `cost` of regions, by which requests go to cheaper ones.

    switchyard bench apply 7 --cost"""
    run = session_of(context)
    found = run.connection.get(f"benchmarks/{benchmark}")
    if found["state"] != "done" or not found["concurrency"]:
        raise Failure(f"benchmark {benchmark} is {found['state']}, and no rate held", ExitCode.CONFLICT)
    capacity = max(1, int(found["concurrency"]))
    deployment = found["deployment"]
    policy = run.connection.get(f"traffic/policies/{deployment}")
    kinds, kind = run.connection.get(f"deployments/{deployment}")["instance_types"], found["instance_type"]
    before = policy["tested_by_type"].get(kind) or policy["tested_concurrency"]
    was = "its version's max_concurrency" if before is None else str(before)
    change: dict[str, Any] = {"tested_concurrency": capacity}
    of_which = f"of {deployment}"
    if len(kinds) > 1:
        change, of_which = {"tested_by_type": {**policy["tested_by_type"], kind: capacity}}, f"{of_which} on {kind}"
    effect = f"Each cell {of_which} will have a capacity of {capacity} concurrent requests instead of {was}."
    if cost:
        change["cost"] = {**policy["cost"], **_relative_costs(run, found)}
        effect += f" Relative token costs: {_listed(change['cost'])}."
    run.confirm(effect, wanted=deployment, yes=yes)
    result = run.connection.patch(f"traffic/policies/{deployment}", change)
    told = f"deployment {deployment}: capacity of {capacity} concurrent requests per cell"
    run.show(result, [told + (f"; tokens cost {_listed(change['cost'])}" if cost else "")])


def _relative_costs(run: Session, found: Mapping[str, Any]) -> dict[str, float]:
    """Region -> token cost relative to the cheapest region, from the newest benchmark of the same use in each."""
    dollars: dict[str, float] = {}
    same = ("workload", "slo")
    done = run.connection.pages("benchmarks", {"deployment": found["deployment"], "state": "done"})
    for row in sorted(done, key=lambda one: int(one["id"])):
        spent = _dollars(row)
        if spent and all(row[name] == found[name] for name in same):
            dollars[row["region"]] = spent
    own = _dollars(found)
    if not own:
        message = f"benchmark {found['id']} has no price: `switchyard create rate machine_price` sets that of a machine"
        raise Failure(message, ExitCode.CONFLICT)
    dollars[found["region"]] = own
    return {region: round(spent / min(dollars.values()), 3) for region, spent in sorted(dollars.items())}


def _dollars(row: Mapping[str, Any]) -> float | None:
    """US dollars per million tokens at the rate that held."""
    held = (point["figures"] for point in row["points"] if point["rate"] == row["goodput"])
    return next((figures.get("dollars_per_mtoken") for figures in held), None)


def _listed(costs: Mapping[str, float]) -> str:
    return ", ".join(f"{value:g} in {region}" for region, value in costs.items())


def _followed(run: Session, found: dict[str, Any]) -> dict[str, Any]:
    """The ended benchmark; prints a line for each change until then."""
    shown = ""
    while found["state"] in OPEN:
        if not run.output.is_for_programs and (line := progress_line(found)) != shown:
            shown = line
            run.output.note(line)
        time.sleep(LOOK_EVERY_S)
        found = run.connection.get(f"benchmarks/{found['id']}")
    return found


def progress_line(found: Mapping[str, Any]) -> str:
    """Progress of a benchmark, from the API."""
    progress = found["progress"]
    if not progress:
        return f"benchmark {found['id']}: {found['state']}, {found['reason']}"
    done = f"{progress['known']} of about {progress['expected']} requests, {progress['inside']} inside"
    return f"point {len(found['points']) + 1}, {progress['rate']:.4g}/s: {done}"


def _show(run: Session, found: dict[str, Any]) -> None:
    if run.output.is_for_programs:
        run.output.document(found)
        return
    run.output.plain(
        f"benchmark {found['id']} of {found['version']} on {found['instance_type'] or '-'}: {found['state']}"
    )
    run.output.plain(f"{found['workload']} within {found['slo']}, {found['cells']} cells: {found['reason']}")
    if found["goodput"]:
        upper = f" to {found['broke_at']:.4g}" if found["broke_at"] else ""
        run.output.plain(
            f"goodput {found['goodput']:.4g}{upper} requests/s, {found['concurrency'] or 0:.3g} concurrent per cell"
        )
    run.output.rows(POINTS, found["points"], empty="No point has been measured yet.")
    if found["key"]:
        others = run.connection.get("benchmarks", {"key": found["key"]})["results"]
        for other in others:
            if other["id"] != found["id"] and other["goodput"]:
                run.output.plain(f"benchmark {other['id']} measured the same: {other['goodput']:.4g} requests/s")
