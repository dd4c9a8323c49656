"""Reads the lines of a batch's input: what is wrong with each, in which order they are best sent, and what is sent of
one. Pure; the caller reads the file and hands over line by line, so memory grows by some bytes a line whatever its
length.
"""

import hashlib
import json
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kernel.decoding import decode_json
from traffic.planning.batch import BatchSettings, LineError

MAX_CUSTOM_ID = 512
MAX_INPUTS = 50_000
"""Texts of all lines for embeddings together, as OpenAI counts."""
PREFIX_LETTERS = (64, 256, 1024, 4096)
"""Of a prompt, at whose ends it may part from another: the levels of a trie. 256 letters are some 64 tokens, four
blocks of an engine's cache."""
DIGEST_BYTES = 4
PATH_BYTES = DIGEST_BYTES * len(PREFIX_LETTERS)
MAX_OUTPUT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A line that is right. `texts`: how many inputs it has; `output`: the most tokens that it may be answered with, 0
    where it does not say."""

    custom_id: str
    body: dict[str, Any]
    texts: int
    output: int

    @property
    def model(self) -> str:
        return str(self.body["model"])


class BadLine(ValueError):
    """A line that no batch may have. `code` and `param` as OpenAI has them."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.param = code, param


def line_of(text: bytes, endpoint: str) -> BatchLine:
    """
    Raises:
        BadLine: the line is not as OpenAI has it.
    """
    try:
        line = decode_json(text)
    except ValueError as error:
        raise BadLine("invalid_json_line", f"This line is not parseable as valid JSON: {error}"[:300]) from error
    if not isinstance(line, dict):
        raise BadLine("invalid_json_line", "A line must be a JSON object with custom_id, method, url and body.")
    custom_id = line.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID:
        message = f"`custom_id` must be a text of 1 to {MAX_CUSTOM_ID} letters."
        raise BadLine("missing_required_parameter" if custom_id is None else "invalid_value", message, "custom_id")
    if line.get("method") != "POST":
        raise BadLine("invalid_method", "`method` must be POST.", "method")
    if line.get("url") != endpoint:
        said = str(line.get("url"))[:80]
        raise BadLine("url_mismatch", f"`url` is {said!r} and must be the batch's endpoint, {endpoint!r}.", "url")
    body = line.get("body")
    if not isinstance(body, dict):
        raise BadLine("missing_required_parameter", "`body` must be a JSON object.", "body")
    if not isinstance(body.get("model"), str) or not body["model"] or len(body["model"]) > 200:
        raise BadLine("missing_required_parameter", "`body.model` must name a model.", "body.model")
    _check_body(body)
    return BatchLine(custom_id, body, _texts(body), _output(body))


def _check_body(body: dict[str, Any]) -> None:
    if body.get("stream"):
        raise BadLine("invalid_value", "`body.stream` is not possible in a batch: leave it out.", "body.stream")
    for name in ("store", "background", "previous_response_id"):
        if body.get(name):
            raise BadLine("invalid_value", f"`body.{name}` is not possible in a batch: leave it out.", f"body.{name}")


def _texts(body: dict[str, Any]) -> int:
    texts = body.get("input")
    return len(texts) if isinstance(texts, list) and texts and not isinstance(texts[0], int) else 1


def _output(body: dict[str, Any]) -> int:
    names = ("max_completion_tokens", "max_tokens", "max_output_tokens")
    stated = next((body[name] for name in names if isinstance(body.get(name), int)), 0)
    return max(0, min(int(stated), MAX_OUTPUT))


def prefix_path(body: dict[str, Any]) -> bytes:
    """Where in the trie of prompts this one is: equal up to a level as long as the prompts are."""
    prompt = body.get("messages", body.get("prompt", body.get("input", "")))
    text = prompt if isinstance(prompt, str) else _rendered(prompt, PREFIX_LETTERS[-1])
    path = b""
    for letters in PREFIX_LETTERS:
        # The model's own instructions come first in the prompt of a response.
        head = f"{body.get('instructions') or ''}\0{text}"[:letters].encode("utf-8", "surrogatepass")
        path += hashlib.blake2b(head, digest_size=DIGEST_BYTES).digest()
    return path


def _rendered(prompt: object, letters: int) -> str:
    """Roles and texts of messages one after the other, in the order of the prompt that an engine makes of them."""
    found, length = [], 0
    for text in _texts_in(prompt, 0):
        found.append(text[:letters])
        length += len(found[-1])
        if length >= letters:
            break
    return "\0".join(found)


def _texts_in(value: object, depth: int) -> Iterator[str]:
    if isinstance(value, str | int | float):
        yield str(value)
    elif isinstance(value, list) and depth < 8:
        for inner in value:
            yield from _texts_in(inner, depth + 1)
    elif isinstance(value, dict) and depth < 8:
        for name in ("role", "type", "content", "text"):
            if name in value:
                yield from _texts_in(value[name], depth + 1)


class LineIndex:
    """What is known of an input file's lines: their places, their paths, and whether a `custom_id` came twice.

    `salt` makes the digests of ids unforgeable: two ids with one digest of 64 bits would be refused as one, and by
    accident that happens once in 40 million files of a million lines.
    """

    def __init__(self, *, endpoint: str, salt: bytes, settings: BatchSettings) -> None:
        self._endpoint, self._salt, self._settings = endpoint, salt, settings
        self._ids: set[int] = set()
        self._starts, self._lengths, self._outputs = array("Q"), array("L"), array("L")
        self._paths = bytearray()
        self._texts = 0
        self.model = ""
        self.errors: list[LineError] = []
        self.errors_in_all = 0
        self._number = 0

    def __len__(self) -> int:
        return len(self._starts)

    def add(self, text: bytes, start: int) -> None:
        """The next line, which begins at this byte of the file. An empty one is passed over."""
        self._number += 1
        if not text.strip():
            return
        if len(self) >= self._settings.max_lines:
            if len(self) == self._settings.max_lines:
                most = self._settings.max_lines
                self._note(LineError("too_many_tasks", f"A batch may have at most {most} lines."))
            self._starts.append(start)  # past the limit: so it is said once
            return
        try:
            line = self._checked(text)
        except BadLine as bad:
            self._note(LineError(bad.code, str(bad), self._number, bad.param))
            return
        except (ValueError, TypeError, ArithmeticError, LookupError, RecursionError) as error:
            # No line that a check did not foresee keeps its batch from its end.
            self._note(LineError("invalid_value", f"This line cannot be read: {error}"[:300], self._number))
            return
        self._starts.append(start)
        self._lengths.append(len(text))
        self._outputs.append(line.output)
        self._paths += prefix_path(line.body)

    def finish(self) -> None:
        if not self._starts and not self.errors:
            self._note(LineError("empty_file", "The input file has no lines."))
        if self._texts > MAX_INPUTS and self._endpoint == "/v1/embeddings":
            self._note(LineError("too_many_tasks", f"A batch for embeddings may have at most {MAX_INPUTS} inputs."))
        self._ids = set()

    def order(self) -> list[int]:
        """The lines as they are best sent: those that share a beginning one after the other, depth first, so that an
        engine reads it once; beginnings with the longest outputs first, because the last lines decide when all is
        over."""
        longest: dict[bytes, int] = {}
        for place, output in enumerate(self._outputs):
            first = self._path(place)[:DIGEST_BYTES]
            longest[first] = max(longest.get(first, 0), output)

        def rank(place: int) -> bytes:  # one object a line, where a tuple would be three
            path = self._path(place)
            return (MAX_OUTPUT - longest[path[:DIGEST_BYTES]]).to_bytes(4) + path

        return sorted(range(len(self._outputs)), key=rank)

    def _path(self, place: int) -> bytes:
        return bytes(self._paths[place * PATH_BYTES : (place + 1) * PATH_BYTES])

    def place(self, line: int) -> tuple[int, int]:
        """First byte and length of a line in the file."""
        return self._starts[line], self._lengths[line]

    def _checked(self, text: bytes) -> BatchLine:
        if len(text) > self._settings.max_line_bytes:
            raise BadLine("invalid_json_line", f"A line may have at most {self._settings.max_line_bytes} bytes.")
        line = line_of(text, self._endpoint)
        digest = hashlib.blake2b(line.custom_id.encode("utf-8", "surrogatepass"), digest_size=8, key=self._salt)
        number = int.from_bytes(digest.digest())
        if number in self._ids:
            message = f"The custom_id {line.custom_id[:80]!r} is there twice: name each line differently."
            raise BadLine("duplicate_custom_id", message, "custom_id")
        self._ids.add(number)
        self.model = self.model or line.model
        if line.model != self.model:
            message = f"`body.model` is {line.model[:80]!r}, in an earlier line {self.model[:80]!r}: a batch has one."
            raise BadLine("model_mismatch", message, "body.model")
        self._texts += line.texts
        return line

    def _note(self, error: LineError) -> None:
        self.errors_in_all += 1
        if len(self.errors) < self._settings.max_line_errors:
            self.errors.append(error)


def sent_body(text: bytes) -> tuple[str, bytes]:
    """The `custom_id` of a line that was checked, and the body that is sent: written anew, so that no reader on the way
    finds anything else in it, with the model first."""
    line = json.loads(text)
    body = line["body"]
    written = json.dumps({"model": body["model"], **body}, separators=(",", ":"), allow_nan=False)
    return str(line["custom_id"]), written.encode()
