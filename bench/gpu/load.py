"""Requests to a cell proxy and what they take: one request with its first token, or many clients for some seconds."""

import http.client
import json
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

REQUEST_LIMIT_S = 120.0
PROMPT = "Once upon a time there was a machine that counted everything it saw, and one day it"


@dataclass(frozen=True, slots=True)
class Answer:
    """`first_s`: until the first token; `tokens`: as the engine counted them."""

    text: str
    tokens: int
    first_s: float
    whole_s: float


class Failed(Exception):
    """A request failed; the text has status and body."""


def complete(port: int, model: str, prompt: str, tokens: int, *, endless: bool = False) -> Answer:
    """Sends one greedy streamed completion. `endless`: ignore the end of the text. Raises Failed."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({"ignore_eos": True} if endless else {}),
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=REQUEST_LIMIT_S)
    began_s = time.monotonic()
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise Failed(f"status {response.status}: {response.read(500).decode(errors='replace')}")
        return _read(response, began_s)
    except (OSError, http.client.HTTPException) as error:
        raise Failed(f"{type(error).__name__}: {error}") from error
    finally:
        connection.close()


def _read(response: http.client.HTTPResponse, began_s: float) -> Answer:
    text, tokens, first_s = "", 0, 0.0
    while line := response.readline():
        data = line.decode().partition("data: ")[2].strip()
        if not data or data == "[DONE]":
            continue
        event: dict[str, Any] = json.loads(data)
        if "error" in event:
            raise Failed(f"the stream ended with {event['error']}")
        if piece := "".join(choice.get("text") or "" for choice in event.get("choices", ())):
            text, first_s = text + piece, first_s or time.monotonic() - began_s
        if usage := event.get("usage"):
            tokens = int(usage["completion_tokens"])
    if not tokens:
        raise Failed("the stream ended without usage")
    return Answer(text, tokens, first_s, time.monotonic() - began_s)


@dataclass(frozen=True, slots=True)
class Load:
    """What some clients got. `failures`: of requests, by their texts' beginnings."""

    clients: int
    seconds: float
    requests: int
    tokens: int
    failures: tuple[str, ...]
    first_ms: tuple[float, float, float]
    """Least, median and greatest time to the first token."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def as_json(self) -> dict[str, Any]:
        names = ("clients", "requests", "tokens", "failures", "first_ms")
        return {
            **{name: getattr(self, name) for name in names},
            "seconds": round(self.seconds, 2),
            "tokens_per_s": round(self.tokens_per_s, 1),
        }


def put_load(port: int, model: str, clients: int, seconds: float, tokens: int) -> Load:
    """Has each client send one request after the other, until `seconds` are over; running ones are finished."""
    answers: list[Answer] = []
    failures: list[str] = []
    began_s = time.monotonic()

    def work(number: int) -> None:
        turn = 0
        while time.monotonic() - began_s < seconds:
            turn += 1
            try:
                answers.append(complete(port, model, f"{number}.{turn} {PROMPT}", tokens, endless=True))
            except Failed as error:
                failures.append(str(error)[:200])
                time.sleep(0.2)

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Load(
        clients=clients,
        seconds=time.monotonic() - began_s,
        requests=len(answers),
        tokens=sum(answer.tokens for answer in answers),
        failures=tuple(sorted(set(failures))[:5]),
        first_ms=spread([answer.first_s * 1000 for answer in answers]),
    )


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Least, median and greatest, rounded; zeros for no values."""
    if not values:
        return 0.0, 0.0, 0.0
    return round(min(values), 1), round(statistics.median(values), 1), round(max(values), 1)
