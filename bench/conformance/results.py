"""What clients reported of an ingress, and the page made of it. Pure.

A feature that fails because of the engine, the demo's model or the client, and not because of Switchyard, is a limit:
`LIMITS` names it with its reason."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from bench.conformance.clients import Client, Family

FEATURES: Final[dict[str, str]] = {
    "models": "lists the models and gets one",
    "chat": "one answer to a conversation",
    "logprobs": "probabilities of tokens",
    "choices": "several answers to one question",
    "stop": "ends at a stop sequence or at a length",
    "seed": "the same seed gives the same answer",
    "stream": "an answer as a stream",
    "cancel": "a stream that the client leaves; the next request is answered",
    "concurrent": "50 streams at the same time, all of them whole",
    "completions": "continues a text",
    "tools": "a tool call that the request requires, with arguments that fit its schema",
    "tools_stream": "the same as a stream",
    "agent": "the model decides to call a tool and answers with its result",
    "structured": "an answer that fits a JSON schema",
    "grammar": "an answer that fits a regular expression, by vLLM's `structured_outputs`",
    "responses": "OpenAI's Responses",
    "messages": "Anthropic's messages",
    "count_tokens": "counts the tokens of a message",
    "tokenize": "text to tokens and back",
    "embeddings": "vectors of texts",
    "rerank": "documents ordered by relevance",
    "unknown_model": "404 arrives as the client's own error",
    "wrong_key": "401 arrives as the client's own error",
    "bad_request": "400 arrives as the client's own error and names the parameter",
    "load": "a load generator's run without a failed request",
}

COLUMNS: Final[dict[str, tuple[str, ...]]] = {
    "models": ("models",),
    "chat": ("chat", "logprobs", "choices", "stop", "seed"),
    "stream": ("stream", "cancel", "concurrent"),
    "completions": ("completions",),
    "tools": ("tools", "tools_stream"),
    "agent": ("agent",),
    "structured": ("structured", "grammar"),
    "responses": ("responses",),
    "messages": ("messages", "count_tokens"),
    "vectors": ("embeddings", "rerank"),
    "tokens": ("tokenize",),
    "errors": ("unknown_model", "wrong_key", "bad_request"),
    "load": ("load",),
}
"""Each feature is in one column."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Why a feature cannot work. An empty `engine` or `client` stands for all of them."""

    feature: str
    reason: str
    engine: str = ""
    client: str = ""

    def covers(self, result: "Result") -> bool:
        wanted = (self.feature, self.engine or result.engine, self.client or result.client)
        return wanted == (result.feature, result.engine, result.client)

    @property
    def title(self) -> str:
        where = f" on {self.engine}" if self.engine else ""
        return f"{self.client + ', ' if self.client else ''}`{self.feature}`{where}"


LIMITS: Final = (
    Limit(
        "embeddings",
        "smollm2 generates text; vLLM makes vectors only with models that are made for it",
        engine="vllm",
    ),
    Limit("rerank", "smollm2 generates text; vLLM reranks only with models that are made for it", engine="vllm"),
    Limit(
        "agent",
        "smollm2 has 135 million parameters, too few to decide on a tool call; required calls are in `tools`",
        engine="vllm",
    ),
    Limit(
        "structured",
        "it sends the form of Hugging Face's own server (`json_object` with `value`), which OpenAI's API does not have",
        client="huggingface-hub",
    ),
)


@dataclass(frozen=True, slots=True)
class Result:
    """One feature by one client on one engine. `reason` is empty if it works."""

    client: str
    engine: str
    feature: str
    reason: str = ""

    @property
    def limit(self) -> Limit | None:
        return next((limit for limit in LIMITS if self.reason and limit.covers(self)), None)

    @property
    def has_failed(self) -> bool:
        return bool(self.reason) and self.limit is None


def results_of(client: str, engine: str, output: str) -> list[Result]:
    """The results that a script printed; other lines are ignored. Raises ValueError for a feature that features.py does
    not list."""
    found = []
    for line in output.splitlines():
        try:
            stated = json.loads(line)
            result = Result(client, engine, stated["feature"], stated["reason"])
        except (ValueError, KeyError, TypeError):
            continue
        if result.feature not in FEATURES:
            raise ValueError(f"{client}: features.py does not list {result.feature!r}")
        found.append(result)
    return found


def page(results: Sequence[Result], clients: Sequence[Client], heading: str) -> str:
    """The page as Markdown: a table for each family with a row per client, what did not pass, features, versions."""
    lines = ["# Third-party clients", "", heading, "", *_LEGEND, ""]
    for family in Family:
        rows = [client.name for client in clients if client.family is family]
        if rows:
            lines += [f"## {family}", "", *_table(rows, results), ""]
    lines += ["## What did not pass", "", *_reasons(results), "", "## Columns and features", ""]
    for column, features in COLUMNS.items():
        lines += [f"- {column}"] + [f"    - `{feature}`: {FEATURES[feature]}" for feature in features]
    lines += ["", "## Versions", ""]
    lines += [f"- {client.name}: {' '.join(client.packages) or 'as installed'}" for client in clients]
    return "\n".join(lines) + "\n"


_LEGEND: Final = (
    "- yes: every feature of the column that was tried works on every engine, and errors arrive as the client's own.",
    "- limit: the engine, the demo's model or the client cannot do it, for a reason that is named below.",
    "- partly: some features of the column work and the others are limits.",
    "- empty: the client lacks the feature, or its script does not try it.",
)


def _table(clients: Sequence[str], results: Sequence[Result]) -> list[str]:
    engines = tuple(dict.fromkeys(result.engine for result in results))
    columns = [
        (column, features)
        for column, features in COLUMNS.items()
        if any(result.client in clients and result.feature in features for result in results)
    ]
    rows = []
    for client in clients:
        own = [result for result in results if result.client == client]
        rows.append(
            [client, *(_cell([each for each in own if each.feature in named], engines) for _, named in columns)]
        )
    head = ["client", *(column for column, _ in columns)]
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def _cell(results: Sequence[Result], engines: Sequence[str]) -> str:
    """One word if it holds on every engine of the page, else one for each engine that the client ran on."""
    by_engine = {engine: [result for result in results if result.engine == engine] for engine in engines}
    words = {engine: _word(found) for engine, found in by_engine.items() if found}
    if len(words) == len(engines) and len(set(words.values())) == 1:
        return words[engines[0]]
    return ", ".join(f"{engine}: {word}" for engine, word in words.items())


def _word(results: Sequence[Result]) -> str:
    if any(result.has_failed for result in results):
        return "**fails**"
    limited = sum(result.limit is not None for result in results)
    return "yes" if not limited else "limit" if limited == len(results) else "partly"


def _reasons(results: Iterable[Result]) -> list[str]:
    limits = dict.fromkeys(each.limit for each in results)
    stated = [f"- {limit.title}: {limit.reason}." for limit in limits if limit is not None]
    failed = [each for each in results if each.has_failed]
    stated += [f"- **{each.client}, `{each.feature}` on {each.engine}**: {_plain(each.reason)}" for each in failed]
    return stated or ["Nothing."]


def _plain(reason: str) -> str:
    return " ".join(reason.split()).replace("|", "\\|").replace("<", "&lt;")
