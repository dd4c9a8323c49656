"""How a script of one client says what it tried: cases by feature, a JSON line for each. Python alone is needed."""

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable

BASE_URL = os.environ["CONFORMANCE_BASE_URL"]
"""Of the ingress, with its `/v1`."""
MODEL = os.environ["CONFORMANCE_MODEL"]
KEY = os.environ["CONFORMANCE_KEY"]
TOKENIZER = os.environ.get("CONFORMANCE_TOKENIZER", "")
"""A folder, for load generators that count tokens themselves."""
QUESTION = "What is the capital of France?"
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

_cases: dict[str, Callable[[], None]] = {}


def case(feature: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Declare a function that raises unless the feature works."""

    def declared(function: Callable[[], None]) -> Callable[[], None]:
        _cases[feature] = function
        return function

    return declared


def main() -> None:
    """Try every case, and say how each went."""
    for feature, function in _cases.items():
        reason = ""
        try:
            function()
        except Exception as error:
            at = traceback.extract_tb(error.__traceback__)[1:2]
            line = f"{at[0].line}: " if at else ""
            reason = f"{type(error).__name__}: {line}{error}"[:REASON_LETTERS]
        print(json.dumps({"feature": feature, "reason": reason}), flush=True)


def expect(is_so: object, what: object) -> None:
    """Raise unless it is so."""
    if not is_so:
        raise AssertionError(f"unexpected: {what!r}"[:REASON_LETTERS])


def expect_weather(arguments: str | dict[str, object]) -> None:
    """Arguments of a call of the tool `weather` fit its schema."""
    said = json.loads(arguments) if isinstance(arguments, str) else arguments
    expect(set(said) == {"city", "unit"} and said["unit"] in {"celsius", "fahrenheit"}, said)
    expect(isinstance(said["city"], str), said)


def expect_error(kind: type[Exception], call: Callable[[], object]) -> Exception:
    """The error of this kind that a call ends with."""
    try:
        said = call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}, but {said!r}"[:REASON_LETTERS])


def run(*command: str, limit_s: float = 300, **variables: str) -> str:
    """What a program prints, once it has ended well."""
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
    expect(done.returncode == 0, f"{command[0]} ended with {done.returncode}: …{text[-REASON_LETTERS:]}")
    return text


def beside_this_python(name: str) -> str:
    """A program of this environment."""
    return os.path.join(os.path.dirname(sys.executable), name)
