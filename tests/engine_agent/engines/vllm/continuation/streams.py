"""Streams of an engine: their events and marks, repeats with the first of their tokens, and comparison without what a
continuation cannot keep: times, generated ids, and how many tokens an event has."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import httpx

from engine_agent.protocol.continuation import CONTINUATION_MEMBER, PROMPT_MARK, TOKENS_MARK
from tests.asking import CLIENT

LIMIT_S = 600.0
REQUEST_ID = "0f5c-continued"
TIMES = re.compile(rb'"(created|created_at|completed_at)":\s*\d+')
IDS = re.compile(rb'"(id|item_id|call_id)":\s*"((?:resp|msg|fc|rs|call|chatcmpl)[-_][^"]*)"')
TEXTS = (
    *("content", "reasoning", "reasoning_content", "text", "delta", "partial_json", "thinking", "arguments"),
    *("logprobs", "token_ids"),
)
"""Members that grow from event to event."""


@dataclass(frozen=True)
class Stream:
    """An answer. `groups`: the ids of each mark, `events`: names and data, in order."""

    status: int
    body: bytes

    @property
    def prompt(self) -> str:
        *_, mark = (line for line in self.body.splitlines() if line.startswith(PROMPT_MARK))
        return mark.removeprefix(PROMPT_MARK).decode().replace(" ", ":")

    @property
    def groups(self) -> list[list[int]]:
        marks = (line for line in self.body.splitlines() if line.startswith(TOKENS_MARK))
        return [[int(one) for one in mark.removeprefix(TOKENS_MARK).split(b",")] for mark in marks]

    @property
    def tokens(self) -> list[int]:
        return [token for group in self.groups for token in group]

    def events(self) -> Iterator[Any]:
        """Generated ids are numbered in their order."""
        ids: dict[bytes, int] = {}

        def numbered(found: re.Match[bytes]) -> bytes:
            return b'"%b":"%d"' % (found[1], ids.setdefault(found[2], len(ids)))

        for line in IDS.sub(numbered, TIMES.sub(rb'"\1":0', self.body)).splitlines():
            if line.startswith(b"data: ") and line != b"data: [DONE]":
                yield json.loads(line.removeprefix(b"data: "))

    def merged(self) -> list[tuple[str, dict[str, Any]]]:
        """Events with equal fixed parts become one, whose growing parts are joined."""
        joined: list[tuple[str, dict[str, Any]]] = []
        for event in self.events():
            grown: dict[str, Any] = {}
            fixed = json.dumps(_fixed(event, grown), sort_keys=True)
            if joined and joined[-1][0] == fixed and joined[-1][1].keys() == grown.keys():
                for name, value in grown.items():
                    joined[-1][1][name] += value
            else:
                joined.append((fixed, grown))
        return joined


def _fixed(value: Any, grown: dict[str, Any], place: str = "") -> Any:
    """The event without its growing members, which are added to `grown` by place."""
    if isinstance(value, list):
        return [_fixed(each, grown, f"{place}[{at}]") for at, each in enumerate(value)]
    if not isinstance(value, dict):
        return value
    kept = {}
    for name, each in value.items():
        if name in TEXTS and isinstance(each, str | list) and "item" not in value and "response" not in value:
            grown[f"{place}.{name}"] = each
        elif name == "logprobs" and isinstance(each, dict):
            grown |= {f"{place}.logprobs.{part}": list(listed) for part, listed in each.items() if listed is not None}
        elif name != "sequence_number":
            kept[name] = _fixed(each, grown, f"{place}.{name}")
    return kept


def marked(
    url: str,
    path: str,
    body: dict[str, Any],
    cut: tuple[str, Sequence[Sequence[int]]] | None = None,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> Stream:
    """The marked stream of a request, repeated with a prompt's name and groups if it was `cut`."""
    text = json.dumps({"model": "smollm2", "stream": True, **body})
    if cut is not None:
        member = {"prompt": cut[0], "groups": cut[1]}
        text = f'{text[:-1]}, "{CONTINUATION_MEMBER}": {json.dumps(member)}}}'
    return sent(url, path, text, {"x-switchyard-continuation": "on", **headers})


def sent(url: str, path: str, text: str, headers: dict[str, str]) -> Stream:
    headers = {"content-type": "application/json", "x-request-id": REQUEST_ID, **headers}
    answer = CLIENT.post(f"{url}{path}", content=text, headers=headers, timeout=LIMIT_S)
    return Stream(answer.status_code, answer.content)


def cut_after(url: str, path: str, body: dict[str, Any], groups: int) -> Iterator[Stream]:
    """Yields the stream as it is after so many marks, while its connection is open, and at its end."""
    text = json.dumps({"model": "smollm2", "stream": True, **body})
    headers = {"content-type": "application/json", "x-switchyard-continuation": "on", "x-request-id": REQUEST_ID}
    found = Stream(200, b"")
    with CLIENT.stream("POST", f"{url}{path}", content=text, headers=headers, timeout=LIMIT_S) as answer:
        try:
            for piece in answer.iter_raw():
                found = Stream(answer.status_code, found.body + piece)
                if len(found.groups) >= groups:
                    yield found
                    groups = 1 << 30
        except httpx.TransportError:
            pass
    yield found
