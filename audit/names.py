"""How an action and its object are called in records: the same for the API and for pages, from what was asked for.
Pure."""

from collections.abc import Mapping
from typing import Any

VERBS = {"update": "change", "partial_update": "change", "destroy": "delete", "new": "create"}
NOUNS = {"version": "model-version"}
"""Pages name some things more briefly than the API does."""
PAGES = {"evacuate": "evacuation.create", "override-end": "override.end", "agents-enrol": "agent.enrol"}
KEYS = ("id", "prefix", "name", "key")
"""Of an answer's fields, those that name what was made; the first that is there counts."""


def api_action(basename: str, action: str) -> str:
    """`rollout.pause` of the view set `rollout` and its action `pause`."""
    return f"{basename}.{VERBS.get(action, action.replace('_', '-'))}"


def page_action(url_name: str, arguments: Mapping[str, Any]) -> str:
    """`rollout.pause` of the page `rollout-action` with the argument `pause`; `key.create` of `key-new`."""
    if url_name in PAGES:
        return PAGES[url_name]
    noun, _, verb = url_name.rpartition("-")
    if verb == "action" and "action" in arguments:
        verb = str(arguments["action"])
    return f"{NOUNS.get(noun, noun)}.{VERBS.get(verb, verb)}" if noun else url_name


def noun_of(action: str) -> str:
    """What an action is done to: `rollout` of `rollout.pause`."""
    return action.partition(".")[0]


def key_of(arguments: Mapping[str, Any]) -> str:
    """The key of the thing in a URL's arguments; "" if they name none."""
    return next((str(value) for name, value in arguments.items() if name not in {"action", "kind"}), "")


def key_in(answer: Any) -> str:
    """The key of what was made, as an answer of the API names it."""
    if not isinstance(answer, dict):
        return ""
    found = (answer[name] for name in KEYS if isinstance(answer.get(name), str | int))
    return str(next(found, ""))
