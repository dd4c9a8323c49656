"""What clients said of an ingress, and the page that is made of it. Pure.

A feature that fails for a reason of the engine or the model, and not of ours, is a limit: it is named, with the reason.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from bench.conformance.features import FEATURES

LIMITS: Final[Mapping[tuple[str, str], str]] = {
    ("vllm", "embeddings"): "smollm2 generates text: vLLM makes vectors with models that are made for it",
}
"""(engine, feature) -> why it cannot pass in the demo's fleet."""


@dataclass(frozen=True, slots=True)
class Result:
    """One feature by one client on one engine. `reason` is empty where it works."""

    client: str
    engine: str
    feature: str
    reason: str = ""

    @property
    def limit(self) -> str:
        """Why it was not expected to work."""
        return LIMITS.get((self.engine, self.feature), "") if self.reason else ""

    @property
    def has_failed(self) -> bool:
        return bool(self.reason) and not self.limit


def results_of(client: str, engine: str, output: str) -> list[Result]:
    """What a script printed. Lines that are not its own are left out; a feature that we do not know is one to add."""
    found = []
    for line in output.splitlines():
        try:
            said = json.loads(line)
            result = Result(client, engine, said["feature"], said["reason"])
        except (ValueError, KeyError, TypeError):
            continue
        if result.feature not in FEATURES:
            raise ValueError(f"{client}: {result.feature!r} is no feature of features.py")
        found.append(result)
    return found


def page(results: Sequence[Result], versions: Mapping[str, Sequence[str]], heading: str) -> str:
    """The page as Markdown: a table for each engine, clients by features, and what did not pass."""
    lines = ["# Clients of others", "", heading, ""]
    for engine in dict.fromkeys(result.engine for result in results):
        lines += [f"## On {engine}", "", *_table([result for result in results if result.engine == engine]), ""]
    lines += ["## What did not pass", "", *_reasons(results), "", "## Features and versions", ""]
    lines += [f"- `{name}`: {text}" for name, text in FEATURES.items()]
    lines += ["", *(f"- {name}: {' '.join(packages) or 'as installed'}" for name, packages in versions.items())]
    return "\n".join(lines) + "\n"


def _table(results: Sequence[Result]) -> list[str]:
    clients = list(dict.fromkeys(result.client for result in results))
    by_place = {(result.feature, result.client): result for result in results}
    rows = [
        [f"`{feature}`", *(_word(by_place.get((feature, client))) for client in clients)]
        for feature in FEATURES
        if any((feature, client) in by_place for client in clients)
    ]
    head = ["feature", *clients]
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def _word(result: Result | None) -> str:
    if result is None:
        return ""
    return "**fails**" if result.has_failed else "limit" if result.limit else "passes"


def _reasons(results: Iterable[Result]) -> list[str]:
    limits = {(each.engine, each.feature): each.limit for each in results if each.limit}
    said = [f"- `{feature}` on {engine}: {limit}." for (engine, feature), limit in limits.items()]
    failed = [each for each in results if each.has_failed]
    said += [f"- **{each.client}, `{each.feature}` on {each.engine}**: {_plain(each.reason)}" for each in failed]
    return said or ["Nothing."]


def _plain(reason: str) -> str:
    return " ".join(reason.split()).replace("|", "\\|").replace("<", "&lt;")
