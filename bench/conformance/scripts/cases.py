"""How a client's script reports what it tried: one JSON line per feature. Needs only the standard library.

A script declares its features by `features`, which checks plain return values, or one by one by `case`."""

import asyncio
import inspect
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

BASE_URL = os.environ["CONFORMANCE_BASE_URL"]
"""Of the ingress, with its `/v1`."""
ROOT_URL = BASE_URL.removesuffix("/v1")
MODEL = os.environ["CONFORMANCE_MODEL"]
KEY = os.environ["CONFORMANCE_KEY"]
WRONG_KEY = "sw_000000000000_wrong"
UNKNOWN_MODEL = "gpt-9"
TOKENIZER = os.environ.get("CONFORMANCE_TOKENIZER", "")
"""A folder, for load generators that count tokens themselves."""
QUESTION = "What is the capital of France?"
WEATHER_QUESTION = "What is the weather in Paris?"
BEGINNING = "The capital of France is"
MESSAGES = [{"role": "user", "content": QUESTION}]
WEATHER_PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather in a city.", "parameters": WEATHER_PARAMETERS},
}
REASON_LETTERS = 400
CASE_WITHIN_S = 240
"""A client that waits longer than this for one feature fails it."""

_cases: dict[str, Callable[[], object]] = {}


def case(feature: str) -> Callable[[Callable[[], object]], Callable[[], object]]:
    """Declare a function that raises unless the feature works. It may be asynchronous."""

    def declared(function: Callable[[], object]) -> Callable[[], object]:
        _cases[feature] = function
        return function

    return declared


def features(*, errors: Callable[[str, str], object] | None = None, **tried: Callable[[], Any]) -> None:
    """Declare features by calls whose return values are checked: a text, arguments of a tool, a capital, vectors.

    Args:
        errors: asks as a model's name and a key say; declares `unknown_model` and `wrong_key`.
        tried: a call, possibly asynchronous, by feature."""
    for feature, call in tried.items():
        check = _CHECKS.get(feature, _is_text)
        _cases[feature] = lambda call=call, check=check: check(_finished(call()))
    if errors is not None:
        _cases["unknown_model"] = lambda: expect_status(404, lambda: errors(UNKNOWN_MODEL, KEY))
        _cases["wrong_key"] = lambda: expect_status(401, lambda: errors(MODEL, WRONG_KEY))


def variant(declared: Mapping[str, Callable[[], None]]) -> None:
    declared[sys.argv[1]]()
    main()


def main() -> None:
    signal.signal(signal.SIGALRM, _too_long)
    for feature, function in _cases.items():
        reason = ""
        signal.alarm(CASE_WITHIN_S)
        try:
            _finished(function())
        except Exception as error:
            own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == sys.argv[0]]
            line = f"{own[-1].line}: " if own else ""
            reason = f"{type(error).__name__}: {line}{error}"[:REASON_LETTERS]
        finally:
            signal.alarm(0)
        print(json.dumps({"feature": feature, "reason": reason}), flush=True)


def expect(is_so: object, what: object) -> None:
    if not is_so:
        raise AssertionError(f"unexpected: {what!r}"[:REASON_LETTERS])


def expect_weather(arguments: str | dict[str, object]) -> None:
    said = json.loads(arguments) if isinstance(arguments, str) else arguments
    expect(set(said) == {"city", "unit"} and said["unit"] in {"celsius", "fahrenheit"}, said)
    expect(isinstance(said["city"], str), said)


def expect_error(kind: type[Exception], call: Callable[[], object]) -> Exception:
    try:
        said = call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}, but {said!r}"[:REASON_LETTERS])


def expect_status(status: int, call: Callable[[], object]) -> None:
    """Raise unless a call fails with an error that carries this HTTP status, itself or as its cause."""
    try:
        said = _finished(call())
    except Exception as error:
        chain: list[BaseException] = []
        each: BaseException | None = error
        while each is not None and each not in chain:
            chain.append(each)
            each = each.__cause__ or each.__context__
        if not any(status in _statuses(link) or str(status) in str(link) for link in chain):
            raise
    else:
        raise AssertionError(f"no error of status {status}, but {said!r}"[:REASON_LETTERS])


def run(*command: str, limit_s: float = 300, **variables: str) -> str:
    done = subprocess.run(
        command,
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=limit_s,
        check=False,
    )
    text = done.stdout.decode("utf-8", "replace")
    expect(done.returncode == 0, f"{command[0]} exited with {done.returncode}: …{text[-REASON_LETTERS:]}")
    return text


def beside_this_python(name: str) -> str:
    return os.path.join(os.path.dirname(sys.executable), name)


def _finished(value: object) -> Any:
    return asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value


async def _awaited(value: Any) -> object:
    return await value


def _statuses(error: BaseException) -> set[object]:
    names = ("status_code", "status", "code", "http_status")
    return {getattr(holder, name, None) for holder in (error, getattr(error, "response", None)) for name in names}


def _too_long(_signal: int, _frame: object) -> None:
    raise TimeoutError(f"no result within {CASE_WITHIN_S} s")


def _is_text(said: object) -> None:
    expect(isinstance(said, str) and said.strip(), said)


def _is_capital(said: Any) -> None:
    said = json.loads(said) if isinstance(said, str) else said
    city = said["city"] if isinstance(said, dict) else said.city
    expect(isinstance(city, str), said)


def _are_vectors(said: Any) -> None:
    expect(len(said) == 2 and all(len(vector) > 1 for vector in said), said)


def _is_order(said: Any) -> None:
    expect(sorted(said) == [0, 1], said)


_CHECKS: dict[str, Callable[[Any], None]] = {
    "tools": expect_weather,
    "tools_stream": expect_weather,
    "agent": expect_weather,
    "structured": _is_capital,
    "grammar": _is_capital,
    "embeddings": _are_vectors,
    "rerank": _is_order,
}
