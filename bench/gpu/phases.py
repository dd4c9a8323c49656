"""The phases of a proof within one budget: what each found, or why it failed or was skipped. Pure but for the clock and
the page's file."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Found = dict[str, Any]


class Skip(Exception):
    """A phase does not apply here; the text is the reason on the page."""


@dataclass(slots=True)
class Outcome:
    """`status`: `done`, `failed` or `skipped`; `why`: of the last two."""

    phase: str
    status: str
    seconds: float
    limit_s: float
    why: str = ""
    found: Found = field(default_factory=dict)


@dataclass(slots=True)
class Proof:
    """Runs phases in order and writes all that is known after each one, so that a killed run leaves its results.
    `patience` multiplies the limits of phases, for a machine under other load."""

    budget_s: float
    out: Path
    about: Found
    without: frozenset[str] = frozenset()
    patience: float = 1.0
    outcomes: list[Outcome] = field(default_factory=list)
    now_s: Callable[[], float] = time.monotonic
    _began_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._began_s = self.now_s()

    @property
    def left_s(self) -> float:
        return self.budget_s - (self.now_s() - self._began_s)

    def has_done(self, phase: str) -> bool:
        return any(each.phase == phase and each.status == "done" for each in self.outcomes)

    async def run(
        self,
        phase: str,
        act: Callable[[float], Awaitable[Found]],
        *,
        limit_s: float,
        least_s: float = 5.0,
        after: str = "",
    ) -> bool:
        """Runs a phase with what is left of the budget, at most `limit_s`, which `act` gets. It is skipped if less than
        `least_s` are left, or if phase `after` did not succeed. Returns whether it succeeded."""
        limit_s = min(limit_s * self.patience, self.left_s)
        began_s = self.now_s()
        outcome = Outcome(phase, "skipped", 0.0, round(limit_s, 1))
        if phase in self.without:
            outcome.why = "not requested"
        elif after and not self.has_done(after):
            outcome.why = f"phase {after} did not succeed"
        elif limit_s < least_s:
            outcome.why = f"{max(0.0, limit_s):.0f} s of the budget are left, and it needs {least_s:.0f} s"
        else:
            try:
                outcome.found = await asyncio.wait_for(act(limit_s), limit_s + 1)
                outcome.status = "done"
            except Skip as skipped:
                outcome.why = str(skipped)
            except TimeoutError:
                outcome.status, outcome.why = "failed", f"not within {limit_s:.0f} s"
            except Exception as error:  # one phase must not end the others
                outcome.status, outcome.why = "failed", f"{type(error).__name__}: {error}"
            outcome.seconds = round(self.now_s() - began_s, 1)
        self.outcomes.append(outcome)
        words = outcome.why.splitlines()[0] if outcome.why else json.dumps(outcome.found, default=str)[:300]
        print(f"[{self.budget_s - self.left_s:5.0f} s] {phase}: {outcome.status}  {words}", flush=True)
        self.write()
        return outcome.status == "done"

    def as_json(self) -> Found:
        fields = ("phase", "status", "seconds", "limit_s", "why", "found")
        phases = [{name: getattr(each, name) for name in fields} for each in self.outcomes]
        return {**self.about, "seconds": round(self.budget_s - self.left_s, 1), "phases": phases}

    def write(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        result = self.as_json()
        (self.out / "prove.json").write_text(json.dumps(result, indent=1, default=str) + "\n")
        (self.out / "prove.md").write_text(page(result))


def page(result: Mapping[str, Any]) -> str:
    """The result as Markdown."""
    machine, phases = result["machine"], result["phases"]
    cards = ", ".join(
        f"{card['name']} ({int(float(card['memory.total']))} MiB, driver {card['driver_version']})"
        for card in machine["cards"]
    )
    lines = [
        "# Proof on a GPU",
        "",
        f"- Date: {result['date']}; command: `{result['command']}`",
        f"- Card: {cards or machine['why_no_card']}",
        f"- Machine: {machine['cores']} cores, {machine['system']}, Python {machine['python_version']}, "
        f"torch {machine['versions'].get('torch') or 'none'}",
        f"- Engine: {result.get('engine') or 'none could serve'}; model: {result['model']}",
        f"- Seconds of {result['budget_s']:.0f}: {result['seconds']:.0f}",
        "",
        "| engine | chosen |",
        "| --- | --- |",
        *(f"| {choice['name']} | {choice['outcome']} |" for choice in result["choices"]),
        "",
        "| phase | result | seconds | found |",
        "| --- | --- | ---: | --- |",
        *(
            f"| {each['phase']} | {each['status']} | {each['seconds']:.1f} | {_cell(each['why'] or each['found'])} |"
            for each in phases
        ),
        "",
    ]
    loads = [load for each in phases for load in each["found"].get("loads", ())]
    if loads:
        lines += [
            "| clients | requests | tokens/s | first token, ms: median (least, greatest) | failures |",
            "| ---: | ---: | ---: | --- | ---: |",
            *(
                f"| {load['clients']} | {load['requests']} | {load['tokens_per_s']} | "
                f"{load['first_ms'][1]} ({load['first_ms'][0]}, {load['first_ms'][2]}) | {len(load['failures'])} |"
                for load in loads
            ),
            "",
        ]
    return "\n".join(lines)


def _cell(found: object) -> str:
    """A phase's result in one line of a table; loads have their own table."""
    if isinstance(found, Mapping):
        found = "; ".join(f"{name.replace('_', ' ')} {value}" for name, value in found.items() if name != "loads")
    return " ".join(str(found).split()).replace("|", "\\|")[:600]
