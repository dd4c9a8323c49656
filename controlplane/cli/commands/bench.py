"""Benchmarks: have a version measured, follow it, compare what was found, and use it."""

import json
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
    help="What versions can carry: measure it, compare, choose; the list: switchyard get benchmarks.",
    no_args_is_help=True,
)
app.add_typer(bench, name="bench")

LOOK_EVERY_S = 2.0
OPEN = frozenset({"queued", "running"})
Workload = Annotated[
    str,
    typer.Option("--workload", "-w", help="PROMPT+OUTPUT tokens, mooncake or azure; more after commas: prefix=512."),
]
Slo = Annotated[str, typer.Option("--slo", help="Milliseconds to the first token and between tokens: ttft=500,itl=50.")]
Named = Annotated[int, typer.Argument(metavar="NUMBER", help="As `switchyard get benchmarks` numbers them.")]
POINTS = (
    number("RATE/S", "rate"), Column("VERDICT", at("verdict")), number("INSIDE", "figures.judged_inside"),
    number("OF", "figures.judged"), number("TTFT P50", "figures.ttft_p50_ms"), number("P99", "figures.ttft_p99_ms"),
    number("ITL P50", "figures.itl_p50_ms"), number("P99", "figures.itl_p99_ms"),
    number("TOKENS/S", "figures.tokens_per_s"), number("AT ONCE", "figures.concurrency"),
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
            help="That serves it; else of the model's name.",
            autocompletion=names_of("deployments"),
        ),
    ] = "",
    region: Annotated[str, typer.Option("--region", "-r", help="Where; else its only one.")] = "",
    seed: Annotated[int, typer.Option(min=0, help="The same gives the same requests.")] = 0,
    first_rate: Annotated[float, typer.Option(help="Requests a second to begin with; else found out.")] = 0.0,
    rules: Annotated[
        list[str] | None, typer.Option("--rule", help="Other lengths of points: min_s=20, min_requests=100, most_s=…")
    ] = None,
    beside_traffic: Annotated[
        bool, typer.Option("--beside-traffic", help="Though its cells serve others, who will feel it.")
    ] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Do not wait for the end.")] = False,
) -> None:
    """Find the highest rate of requests at which 99 % are inside an objective. It loads the cells until they break it.

    switchyard bench run sim-70b@1 --workload 1000+150 --slo ttft=1000,itl=60 --region us-east-1
    """
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
    wait: Annotated[bool, typer.Option("--wait", help="Until it has ended.")] = False,
) -> None:
    """Show a benchmark: its points, its goodput, and others that measured the same.

    switchyard bench show 7
    """
    run = session_of(context)
    found = run.connection.get(f"benchmarks/{benchmark}")
    _show(run, _followed(run, found) if wait else found)


@bench.command()
def cancel(context: typer.Context, benchmark: Named, yes: Yes = False) -> None:
    """End one that waits or runs; what it measured stays.

    switchyard bench cancel 7
    """
    run = session_of(context)
    run.confirm(f"Benchmark {benchmark} is not measured to its end.", wanted=str(benchmark), yes=yes)
    _show(run, run.connection.post(f"benchmarks/{benchmark}/cancel", {}))


@bench.command()
def search(
    context: typer.Context,
    version: Annotated[str, typer.Argument(metavar="MODEL@VERSION", help="Which its deployment serves.")],
    vary: Annotated[list[str], typer.Option("--vary", help="NAME=VALUE,VALUE; several times. See below.")],
    workload: Workload,
    slo: Slo,
    deployment: Annotated[
        str,
        typer.Option(
            "-d",
            "--deployment",
            help="Of one region; else of the model's name.",
            autocompletion=names_of("deployments"),
        ),
    ] = "",
    seed: Annotated[int, typer.Option(min=0, help="The same gives the same requests.")] = 0,
    rules: Annotated[
        list[str] | None, typer.Option("--rule", help="Of points at their whole length: min_s=20, min_requests=100.")
    ] = None,
    most_trials: Annotated[int, typer.Option(min=1, help="Measurements, of all lengths together.")] = 40,
    most_hours: Annotated[float, typer.Option(min=0.01)] = 12.0,
    detach: Annotated[bool, typer.Option("--detach", help="Do not wait for the end.")] = False,
    yes: Yes = False,
) -> None:
    """Find the configuration of a version that carries most per chip. Its deployment is rolled out to one after the
    other, so nobody else should need it; at the end it serves again what it does now.

    NAME is engine_options.OPTION, parallelism.DEGREE, max_concurrency, speculation or quantization (JSON values; {} for
    none). Every combination is one configuration: one of each shape is measured, the others are predicted from what
    that tells of a step, and the hopeful ones halved at 25, 50 and 100 % of a point's length.

    switchyard bench search sim-70b@1 --vary engine_options.max_num_seqs=8,32,64 -w 1000+150 --slo ttft=1000,itl=60
    """
    run = session_of(context)
    served = deployment or version.partition("@")[0]
    run.confirm(f"All cells of {served} will serve one configuration after the other.", wanted=served, yes=yes)
    body: dict[str, Any] = {
        "version": version, "deployment": served, "varied": dict(_varied(one) for one in vary), "workload": workload,
        "slo": slo, "seed": seed, "rules": stated(rules or []), "most_trials": most_trials, "most_hours": most_hours,
    }  # fmt: skip
    found = run.connection.post("configuration-searches", body)
    _show_search(run, found if detach else _search_followed(run, found))


@bench.command("search-show")
def search_show(
    context: typer.Context,
    search: Annotated[int, typer.Argument(metavar="NUMBER", help="As `switchyard get searches` numbers them.")],
    wait: Annotated[bool, typer.Option("--wait", help="Until it has ended.")] = False,
) -> None:
    """Show a search: each configuration, what was predicted and measured of it, and why it was left out.

    switchyard bench search-show 3
    """
    run = session_of(context)
    found = run.connection.get(f"configuration-searches/{search}")
    _show_search(run, _search_followed(run, found) if wait else found)


@bench.command("search-cancel")
def search_cancel(
    context: typer.Context, search: Annotated[int, typer.Argument(metavar="NUMBER")], yes: Yes = False
) -> None:
    """End a search; its deployment serves again what it did before.

    switchyard bench search-cancel 3
    """
    run = session_of(context)
    run.confirm(f"Search {search} is not brought to its end.", wanted=str(search), yes=yes)
    _show_search(run, run.connection.post(f"configuration-searches/{search}/cancel", {}))


def _varied(text: str) -> tuple[str, list[Any]]:
    """`max_num_seqs=8,16` or `speculation=[{}, {"method": "ngram"}]`."""
    name, equals, values = text.partition("=")
    if not equals or not values:
        raise Failure(
            f"--vary {text!r} must read NAME=VALUE,VALUE, as engine_options.max_num_seqs=32,64", ExitCode.USAGE
        )
    if values.startswith("["):
        try:
            read = json.loads(values)
        except ValueError:
            raise Failure(f"--vary {name}: {values[:60]!r} is no list of JSON", ExitCode.USAGE) from None
        return name, read
    return name, [_value(value) for value in values.split(",")]


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


CONFIGURATIONS = (
    number("NO", "number"), Column("CONFIGURATION", at("choice")), Column("STANDING", at("standing")),
    number("PREDICTED", "predicted"), number("25 %", "scores.25%"), number("50 %", "scores.50%"),
    number("100 %", "scores.100%"), Column("REASON", at("reason")),
)  # fmt: skip


def _show_search(run: Session, found: dict[str, Any]) -> None:
    if run.output.is_for_programs:
        run.output.document(found)
        return
    run.output.plain(f"search {found['id']} around {found['version']} on {found['deployment']}: {found['state']}")
    run.output.plain(f"{found['workload']} within {found['slo']}: {found['reason']}")
    if found["best"]:
        run.output.plain(f"best: {found['best']}; `switchyard rollout start` rolls it out once it is released")
    run.output.rows(CONFIGURATIONS, found["configurations"], empty="It has no configurations.")


def _search_followed(run: Session, found: dict[str, Any]) -> dict[str, Any]:
    shown = ""
    while found["state"] in OPEN:
        if not run.output.is_for_programs and found["reason"] != shown:
            shown = found["reason"]
            run.output.note(shown)
        time.sleep(LOOK_EVERY_S)
        found = run.connection.get(f"configuration-searches/{found['id']}")
    return found


@bench.command()
def best(
    context: typer.Context,
    workload: Workload,
    slo: Slo,
    instance_type: Annotated[
        str, typer.Option("--type", help="On this one alone.", autocompletion=names_of("instance-types"))
    ] = "",
    aim: Annotated[str, typer.Option(help="goodput, speed, cost or energy.")] = "goodput",
) -> None:
    """Show which version on which instance type is best for a use, and why.

    switchyard bench best --workload 1000+150 --slo ttft=1000,itl=60 --aim cost
    """
    run = session_of(context)
    query = {"workload": workload, "slo": slo, "aim": aim} | ({"instance_type": instance_type} if instance_type else {})
    found = run.connection.get("benchmarks/best", query)
    one = found["best"]
    told = one and f"{one['version']} on {one['instance_type']}: {one['reason']} (benchmark {one['benchmark']})"
    run.show(found, [told or "Nothing was measured so; `switchyard bench run` does."])


@bench.command()
def apply(context: typer.Context, benchmark: Named, yes: Yes = False) -> None:
    """Let its deployment be taken for as able as was measured: set `tested_concurrency`, which shares of traffic and
    the autoscaler count on.

    switchyard bench apply 7
    """
    run = session_of(context)
    found = run.connection.get(f"benchmarks/{benchmark}")
    if found["state"] != "done" or not found["concurrency"]:
        raise Failure(f"benchmark {benchmark} is {found['state']} and found no rate that held", ExitCode.CONFLICT)
    capacity = max(1, int(found["concurrency"]))
    deployment = found["deployment"]
    before = run.connection.get(f"traffic/policies/{deployment}")["tested_concurrency"]
    was = "its version's max_concurrency" if before is None else str(before)
    run.confirm(
        f"Each cell of {deployment} will count for {capacity} requests at once instead of {was}.",
        wanted=deployment,
        yes=yes,
    )
    result = run.connection.patch(f"traffic/policies/{deployment}", {"tested_concurrency": capacity})
    run.show(result, [f"deployment {deployment} counts for {capacity} requests at once a cell"])


def _followed(run: Session, found: dict[str, Any]) -> dict[str, Any]:
    """As it is once it has ended, with a line for each change meanwhile."""
    shown = ""
    while found["state"] in OPEN:
        if not run.output.is_for_programs and (line := progress_line(found)) != shown:
            shown = line
            run.output.note(line)
        time.sleep(LOOK_EVERY_S)
        found = run.connection.get(f"benchmarks/{found['id']}")
    return found


def progress_line(found: Mapping[str, Any]) -> str:
    """How far a benchmark is, as the API shows it."""
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
            f"goodput {found['goodput']:.4g}{upper} requests/s, {found['concurrency'] or 0:.3g} at once a cell"
        )
    run.output.rows(POINTS, found["points"], empty="No point is measured yet.")
    if found["key"]:
        others = run.connection.get("benchmarks", {"key": found["key"]})["results"]
        for other in others:
            if other["id"] != found["id"] and other["goodput"]:
                run.output.plain(f"benchmark {other['id']} measured the same: {other['goodput']:.4g} requests/s")
