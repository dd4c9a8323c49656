"""Prints plans and predicted effects from the API's responses. Pure."""

from collections.abc import Iterator, Mapping
from math import floor
from typing import Any

from controlplane.cli.resources import text_of

SIGN = {"create": "+", "change": "~", "scale": "~", "roll_out": ">", "validate": ">"}
TONE = {"create": "ok", "change": "warn", "scale": "warn", "roll_out": "moving", "validate": "moving"}

Line = tuple[str, str]


def plan_lines(plan: Mapping[str, Any]) -> Iterator[Line]:
    """The steps with their reasons, the predictions, and a summary."""
    for step in plan["steps"]:
        yield from step_lines(step)
    for effect in plan["effects"]:
        yield from forecast_lines(effect["deployment"], effect["forecast"])
    for one in plan["waiting"]:
        yield f"! needs approval: {one['summary']}", "warn"
    for name in plan["not_predicted"]:
        yield f"the effect on {name} was not predicted: too many deployments", "idle"
    yield sum_line(plan), "idle"


def step_lines(step: Mapping[str, Any]) -> Iterator[Line]:
    action = step["action"].replace("_", " ")
    yield f"{SIGN[step['action']]} {action} {step['kind']} {step['name']}: {step['reason']}", TONE[step["action"]]
    for change in step["changes"]:
        yield f"    {change_text(change)}", "idle"


def change_text(change: Mapping[str, Any]) -> str:
    after = text_of(change["after"])
    if change["before"] is None:
        return f"{change['field']}: {after}"
    return f"{change['field']}: {text_of(change['before'])} -> {after}"


def sum_line(plan: Mapping[str, Any]) -> str:
    steps, same = len(plan["steps"]), len(plan["unchanged"])
    done = "done" if plan["applied"] else "to do"
    return f"{steps} {'step' if steps == 1 else 'steps'} {done}, {same} unchanged (revision {plan['revision']})"


def forecast_lines(title: str, forecast: Mapping[str, Any]) -> Iterator[Line]:
    """Duration, cells, and warnings."""
    took = forecast["took_s"]
    how_long = f"over in {took:.0f} s" if took is not None else f"not over within {forecast['looked_s']:.0f} s"
    yield f"  predicted for {title}: {how_long}, {len(forecast['steps'])} changes of cells and nodes", "moving"
    for place in forecast["places"]:
        if place["deployment"] == title or place["ready_least"] < place["ready_now"]:
            where = f"{place['deployment']} in {place['region']}"
            when = f" (in {place['least_at_s']:.0f} s)" if place["ready_least"] < place["ready_now"] else ""
            least = f"{place['ready_least']} at minimum{when}"
            counts = f"{place['ready_now']} ready now, {least}, {place['ready_then']} at the end"
            tone = "bad" if place["ready_least"] == 0 and place["ready_now"] else "idle"
            yield f"    {where}: {counts}, of {place['wanted']}", tone
    for warning in forecast["warnings"]:
        yield f"    ! {warning}", "warn"
    for refusal in forecast["refusals"]:
        yield f"    ! would wait: {refusal}", "warn"


def stress_lines(answer: Mapping[str, Any], simulated: str) -> Iterator[Line]:
    """What holds and what breaks first, and the simulated loss of a region."""
    if not answer["deployments"]:
        yield "No forecast of the next day yet: the process `controller` makes one from the measured load.", "idle"
    else:
        broken = any(row["breaks"] for row in answer["deployments"])
        yield f"{answer['headline'][:1].upper()}{answer['headline'][1:]}.", "bad" if broken else "ok"
    for row in answer["deployments"]:
        held = "" if row["held_until"] is None else f" (now {_multiple(row['held_until'])})"
        holds = f"  {row['deployment']}: holds until {_multiple(row['holds_until'])}{held}"
        if row["breaks"]:
            lacks = f"{row['unplaced']:.0f} of {row['load']:.0f} concurrent requests without room"
            yield f"{holds}; {lacks} at {row['at'][11:16]} UTC, first in {row['first_region']}: TTFT grows", "bad"
        else:
            yield holds, "idle"
    if answer["unknown"]:
        yield f"  without a forecast: {', '.join(answer['unknown'])}", "idle"
    if answer["forecast"] is not None:
        yield from forecast_lines(f"the loss of {simulated}", answer["forecast"])
        for step in answer["forecast"]["steps"]:
            yield f"    T+{step['at_s']:.1f} s {step['subject']}: {step['text']}", "idle"


def _multiple(factor: float) -> str:
    """Rounded down, as in the headline."""
    return f"{floor(10 * factor) / 10:.1f}x"


def diff_lines(plan: Mapping[str, Any]) -> Iterator[Line]:
    """Each difference as two lines, before and after."""
    for step in plan["steps"]:
        yield f"{step['kind']} {step['name']} ({step['action'].replace('_', ' ')})", ""
        for change in step["changes"]:
            if change["before"] is not None:
                yield f"  - {change['field']}: {text_of(change['before'])}", "bad"
            yield f"  + {change['field']}: {text_of(change['after'])}", "ok"


def effect_lines(effects: Mapping[str, Any]) -> Iterator[Line]:
    """Predicted effect on traffic, by deployment and region."""
    for effect in effects["effects"]:
        yield f"{effect['deployment']}:", ""
        for region in effect["regions"]:
            share = region["utilisation_after"]
            full = "no capacity" if share is None else f"{100 * share:.0f} % full"
            over = region["region"] in effect["over_cap"]
            moved = f"{region['load_before']:.1f} -> {region['load_after']:.1f} concurrent requests, {full}"
            yield f"  {region['region']}: {moved}{', over its limit' if over else ''}", "bad" if over else "idle"
        for origin, left in effect["unplaced"].items():
            yield f"  ! {left:.1f} concurrent requests from {origin} fit in no region", "bad"
    if not effects["effects"]:
        yield "no deployment would be moved", "idle"
