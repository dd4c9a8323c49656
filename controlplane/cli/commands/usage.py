"""Usage, cost of machines, rates and budgets."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any

import typer

from controlplane.cli.completion import names_of
from controlplane.cli.errors import Failure
from controlplane.cli.exit_codes import ExitCode
from controlplane.cli.resources import Column, Row, at, number
from controlplane.cli.session import path_of, session_of

app = typer.Typer()
budget = typer.Typer(
    help="Monthly limits of tenants and of machine cost. List: switchyard get budgets.",
    no_args_is_help=True,
)
app.add_typer(budget, name="budget")

DIMENSIONS = ("tenant", "key", "deployment", "class", "adapter")
Since = Annotated[str, typer.Option(help="Start: 7d, 12h or 2w ago, a date, or an RFC 3339 time.")]
Until = Annotated[str, typer.Option(help="End, in the form of --since. Default: now.")]


class Each(StrEnum):
    HOUR = "hour"
    DAY = "day"
    MONTH = "month"


COUNTS = (
    number("REQUESTS", "requests"), number("LIMITED", "limited"), number("ERRORS", "errors"),
    number("REFUSED", "refused"),
    number("CANCELLED", "cancelled"), number("PROMPT", "prompt_tokens"), number("CACHED", "cached_tokens"),
    number("COMPLETION", "completion_tokens"), number("PRICED $", "charged"), number("MACHINES $", "machine_cost"),
)  # fmt: skip


@app.command()
def usage(
    context: typer.Context,
    by: Annotated[
        str, typer.Option(help="Group by tenant, key, deployment, class, separated by commas. Default: one row.")
    ] = "tenant",
    since: Since = "7d",
    until: Until = "",
    each: Annotated[Each | None, typer.Option(help="One row per hour, day or month.")] = None,
    tenant: Annotated[str, typer.Option(help="Only this tenant.")] = "",
    key: Annotated[str, typer.Option(help="Only this key, by its prefix.")] = "",
    deployment: Annotated[str, typer.Option("-d", "--deployment", autocompletion=names_of("deployments"))] = "",
    serving_class: Annotated[str, typer.Option("--class", help="realtime, near_realtime or batch.")] = "",
    adapter: Annotated[str, typer.Option(help="Only this LoRA adapter.")] = "",
) -> None:
    """Show usage and its price, with totals in the last line.

    switchyard usage --by tenant --since 7d"""
    run = session_of(context)
    dimensions = {"tenant": tenant, "key": key, "deployment": deployment, "class": serving_class, "adapter": adapter}
    given = dimensions | {"to": until}
    query = {"group": by, "from": since, "by": each.value if each else "total", "limit": "10000"}
    answer = run.connection.get("usage", query | {name: value for name, value in given.items() if value})
    if run.output.is_for_programs:
        run.output.document(answer)
        return
    shown = [name for name in DIMENSIONS if name in answer["group"]]
    times = (Column("FROM", at("start")),) if each else ()
    columns = (*times, *(Column(name.upper(), at(name)) for name in shown), *COUNTS)
    totals = {**answer["totals"], (shown[0] if shown else "start"): "total"}
    rows: list[Row] = [*answer["rows"], *([totals] if len(answer["rows"]) > 1 else [])]
    run.output.rows(columns, rows, empty="No usage in this period.")
    if answer["truncated"]:
        run.output.note("Only the first 10,000 rows are shown; the totals include all.")


COST_DIMENSIONS = ("deployment", "version", "type", "region", "tenant", "class", "adapter")
IDLE = (number("IDLE $", "idle_cost_usd"), number("$/M WITH IDLE", "usd_per_mtoken_with_idle"))


@app.command()
def cost(
    context: typer.Context,
    by: Annotated[
        str,
        typer.Option(
            help=(
                "Group by deployment, version, type, region, tenant, class, adapter, separated by commas. "
                "Default: one row."
            )
        ),
    ] = "version,type",
    since: Since = "7d",
    until: Until = "",
    each: Annotated[Each | None, typer.Option(help="One row per hour, day or month.")] = None,
    deployment: Annotated[str, typer.Option("-d", "--deployment", autocompletion=names_of("deployments"))] = "",
    region: Annotated[str, typer.Option(autocompletion=names_of("regions"))] = "",
    tenant: Annotated[str, typer.Option(help="Only this tenant.")] = "",
    serving_class: Annotated[str, typer.Option("--class", help="realtime, near_realtime or batch.")] = "",
) -> None:
    """Show cost, energy and emissions of machines, also per million tokens, by user.

    switchyard cost --by tenant,class --since 7d"""
    run = session_of(context)
    given = {"deployment": deployment, "region": region, "tenant": tenant, "class": serving_class, "to": until}
    query = {"group": by, "from": since, "by": each.value if each else "total", "limit": "10000"}
    query |= {name: value for name, value in given.items() if value}
    answer = run.connection.get("costs", query)
    if run.output.is_for_programs:
        run.output.document(answer)
        return
    shown = [name for name in COST_DIMENSIONS if name in answer["group"]]
    totals = answer["totals"]
    has_idle = totals["idle_cost_usd"] is not None
    columns = (
        *((Column("FROM", at("start")),) if each else ()), *(Column(name.upper(), at(name)) for name in shown),
        number("PROMPT", "prompt_tokens"), number("COMPLETION", "completion_tokens"), number("COST $", "cost_usd"),
        number("$/M", "usd_per_mtoken"), *(IDLE if has_idle else ()), number("J/M", "joules_per_mtoken"),
        number("GCO2E/M", "gco2e_per_mtoken"), Column("KNOWN", _sources),
    )  # fmt: skip
    run.output.rows(columns, answer["rows"], empty="No hour of machine cost has ended in this period.")
    run.output.plain("")
    if totals["bill_usd"] is not None:
        sums = f"cells ${totals['cells_usd']} = tenants ${totals['cost_usd']} + idle ${totals['idle_cost_usd']}"
        run.output.plain(f"{sums}; with spares ${totals['spares_usd']} the bill is ${totals['bill_usd']}")
    if answer["batches"] is not None:
        run.output.plain(_batches(answer["batches"]))
    run.output.plain("M: million prompt and completion tokens. KNOWN: source of dollars, joules and CO2e.")
    run.output.plain(f"{totals['open_machine_hours']:g} machine hours are not allocated yet")


def _batches(batches: Row) -> str:
    """Prints the average and the marginal cost of batches."""
    average, marginal = batches["usd_per_mtoken"], batches["marginal_usd_per_mtoken"]
    text = f"batches cost ${batches['cost_usd']}"
    text += "" if average is None else f", ${average:.4f} per million tokens"
    if marginal is None:
        return f"{text}; not enough hours for the marginal cost"
    return f"{text}; a further million would cost ${marginal:.4f} ± {batches['marginal_usd_error']:.4f}"


def _sources(row: Row, _: datetime) -> str:
    """ "rated, estimated, estimated": sources of dollars, joules and emissions."""
    return ", ".join(str(row[name]) for name in ("cost_source", "energy_source", "carbon_source"))


class BudgetUnit(StrEnum):
    TOKENS = "tokens"
    USD = "usd"


@budget.command("set")
def budget_set(
    context: typer.Context,
    limit: Annotated[str, typer.Argument(help="Limit per month (UTC), above 0.")],
    unit: Annotated[BudgetUnit, typer.Argument(help="Unit; tokens only for a tenant or key.")],
    tenant: Annotated[str, typer.Option(help="Tenant. Default: a budget for machines.")] = "",
    key: Annotated[str, typer.Option(help="One key, by its prefix.", autocompletion=names_of("keys"))] = "",
    deployment: Annotated[
        str, typer.Option(help="Machine type. Default: all.", autocompletion=names_of("deployments"))
    ] = "",
    alert_at: Annotated[str, typer.Option(help="Alerts at these percentages, separated by commas: 50,80,100.")] = "",
    hard_stop: Annotated[bool | None, typer.Option(help="Reject the key, or the tenant's keys, at 100 %.")] = None,
) -> None:
    """Create or change the monthly budget of a tenant, a key, the machines of a deployment, or the fleet.

    switchyard budget set 1200 usd --tenant rufus --hard-stop"""
    run = session_of(context)
    body: dict[str, Any] = {"limit": limit}
    if alert_at:
        body["alert_at"] = _percents(alert_at)
    if hard_stop is not None:
        body["hard_stop"] = hard_stop
    whose = {"tenant": tenant, "key": key, "deployment": deployment, "unit": unit.value}
    rows = run.connection.pages("budgets", {name: value for name, value in whose.items() if value})
    there = next((row["id"] for row in rows if whose.items() <= row.items()), None)
    if there is not None:
        row = run.connection.patch(path_of("budgets", str(there)), body)
    else:
        row = run.connection.post("budgets", whose | body)
    of = f"tenant {tenant}" if tenant else f"key {key}" if key else f"machines of {deployment or 'the fleet'}"
    then = "then requests are rejected" if row["hard_stop"] else "alerts only"
    run.show(row, [f"{of}: {row['limit']} {row['unit']} per month, {row['used_percent']} % used; {then}"])


def _percents(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise Failure(
            f"{text!r} is invalid; use whole percentages separated by commas, such as 50,80,100", ExitCode.USAGE
        ) from None
