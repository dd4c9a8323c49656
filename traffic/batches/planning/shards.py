"""Divides the input of a batch into shards: as many lines as memory may hold, which are validated, ordered for sending
and written before the next shard is read. Pure.

A `custom_id` occurs once in a batch, so the digests of all IDs are compared at the end. Each shard sorts its digests
into slices by their first bits. A comparison reads the same slices of all shards, so memory does not grow with the
batch."""

import hashlib
import struct
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from traffic.batches.planning.batch import BatchSettings, LineError
from traffic.batches.planning.lines import DIGEST_BYTES, MAX_OUTPUT, BadLine, BatchLine, line_of, prefix_path, work_line

SLICES = 64
"""Slices of the space of digests."""
_SLICE_BITS = 58
ID_RECORD = struct.Struct("<QI")
"""Digest of a `custom_id`, and the number of its line."""
LINES_COMPARED = 500_000
"""IDs in memory at a time."""


@dataclass(frozen=True, slots=True)
class ShardPlace:
    """Where a shard begins: bytes, lines and embedding inputs of the shards before it, its models, and errors found.
    `numbered` counts the lines of the file, including empty ones."""

    start: int = 0
    numbered: int = 0
    lines: int = 0
    inputs: int = 0
    models: Mapping[str, int] = field(default_factory=dict)
    errors: int = 0


class ShardIndex:
    """The lines of a shard. `salt` makes the 64-bit digests of IDs unforgeable; an accidental collision occurs once in
    40 million files of a million lines."""

    def __init__(self, *, endpoint: str, salt: bytes, settings: BatchSettings, place: ShardPlace | None = None) -> None:
        self._endpoint, self._salt, self._settings = endpoint, salt, settings
        self.before = place or ShardPlace()
        self.end, self.numbered, self.inputs = self.before.start, self.before.numbered, self.before.inputs
        self.models: dict[str, int] = {}
        self.first_lines: dict[str, int] = {}
        self.errors: list[LineError] = []
        self.errors_in_all = 0
        self.is_over_limit = False
        self._texts: list[bytes] = []
        self._bytes = 0
        self._ids: dict[int, int] = {}
        self._number_of: dict[str, int] = {}
        self._model_of, self._outputs = array("H"), array("L")
        self._paths: list[bytes] = []

    def __len__(self) -> int:
        return len(self._texts)

    @property
    def is_full(self) -> bool:
        """Whether the next line belongs to the next shard."""
        too_many_errors = self.before.errors + self.errors_in_all >= self._settings.max_error_lines
        is_large = len(self) >= self._settings.shard_lines or self._bytes >= self._settings.shard_bytes
        return is_large or too_many_errors or self.is_over_limit

    def add(self, text: bytes, end: int) -> None:
        """Adds the next line, which ends before this byte of the file. Empty lines are skipped."""
        self.numbered += 1
        self.end = end
        if not text.strip():
            return
        if self.before.lines + len(self) >= self._settings.max_lines:
            self.is_over_limit = True
            message = f"A batch may have at most {self._settings.max_lines} lines."
            self._add_error(LineError("too_many_tasks", message))
            return
        try:
            line = self._checked_line(text)
            written = work_line(line)
        except BadLine as bad:
            self._add_error(LineError(bad.code, str(bad), self.numbered, bad.param))
            return
        except (ValueError, TypeError, ArithmeticError, LookupError, RecursionError) as error:
            # An unforeseen kind of line must not keep its batch open, so any error rejects it.
            self._add_error(LineError("invalid_value", f"This line cannot be read: {error}"[:300], self.numbered))
            return
        self._texts.append(written)
        self._bytes += len(written)
        self._outputs.append(line.output)
        self._paths.append(prefix_path(line.body))

    def texts_in_order(self) -> Iterator[tuple[str, bytes]]:
        """Yields model and work line of each line in sending order: lines of a model together, and of those the lines
        with a common prefix in sequence, depth first, so that an engine computes it once. Prefixes with the longest
        outputs come first, because the last lines determine the end."""
        longest: dict[bytes, int] = {}
        for path, output in zip(self._paths, self._outputs, strict=True):
            first = path[:DIGEST_BYTES]
            longest[first] = max(longest.get(first, 0), output)

        def rank(line: int) -> bytes:  # one object per line instead of three for a tuple
            path = self._paths[line]
            return self._model_of[line].to_bytes(2) + (MAX_OUTPUT - longest[path[:DIGEST_BYTES]]).to_bytes(4) + path

        names = list(self._number_of)
        for line in sorted(range(len(self)), key=rank):
            yield names[self._model_of[line]], self._texts[line]

    def id_records(self) -> tuple[bytes, list[int]]:
        """Returns the digests of all IDs with their lines, in order, and how many lie before the end of each slice."""
        digests = sorted(self._ids)
        records = b"".join(ID_RECORD.pack(digest, self._ids[digest]) for digest in digests)
        return records, [bisect_left(digests, (number + 1) << _SLICE_BITS) for number in range(SLICES)]

    def _checked_line(self, text: bytes) -> BatchLine:
        if len(text) > self._settings.max_line_bytes:
            raise BadLine("invalid_json_line", f"A line may have at most {self._settings.max_line_bytes} bytes.")
        line = line_of(text, self._endpoint)
        digest = hashlib.blake2b(line.custom_id.encode("utf-8", "surrogatepass"), digest_size=8, key=self._salt)
        number = int.from_bytes(digest.digest())
        if number in self._ids:
            message = f"The custom_id {line.custom_id[:80]!r} occurs twice; each line needs its own."
            raise BadLine("duplicate_custom_id", message, "custom_id")
        self._check_inputs(line)
        self._count_model(line.model)
        self._ids[number] = self.numbered
        return line

    def _check_inputs(self, line: BatchLine) -> None:
        self.inputs += line.texts
        most = self._settings.max_lines
        if self.inputs > most and self._endpoint == "/v1/embeddings":
            self.is_over_limit = True
            raise BadLine("too_many_tasks", f"A batch for embeddings may have at most {most} inputs.", "body.input")

    def _count_model(self, model: str) -> None:
        if model not in self.models:
            most = self._settings.max_models
            if model not in self.before.models and len(self.before.models.keys() | self.models.keys()) >= most:
                message = f"The model {model[:80]!r} is one too many; a batch may have at most {most} models."
                raise BadLine("too_many_models", message, "body.model")
            self.first_lines[model] = self.numbered
            self.models[model] = 0
            self._number_of[model] = len(self._number_of)
        self.models[model] += 1
        self._model_of.append(self._number_of[model])

    def _add_error(self, error: LineError) -> None:
        self.errors_in_all += 1
        if len(self.errors) < self._settings.max_error_lines:
            self.errors.append(error)


def plan_comparison(slice_ends: Sequence[Sequence[int]]) -> Iterator[list[tuple[int, int]]]:
    """Yields, for groups of slices that fit into memory, the first and last record of each shard. `slice_ends` are
    those of `ShardIndex.id_records`, by shard."""
    first = 0
    while first < SLICES:
        last = first
        while last + 1 < SLICES and _records_in(slice_ends, first, last + 1) <= LINES_COMPARED:
            last += 1
        yield [(ends[first - 1] if first else 0, ends[last]) for ends in slice_ends]
        first = last + 1


def _records_in(slice_ends: Sequence[Sequence[int]], first: int, last: int) -> int:
    return sum(ends[last] - (ends[first - 1] if first else 0) for ends in slice_ends)


def repeated_lines(parts: Iterable[bytes]) -> list[int]:
    """Returns the lines whose ID occurs in an earlier one. `parts` are records of one group, by shard."""
    seen: set[int] = set()
    found: list[int] = []
    for part in parts:
        for digest, line in ID_RECORD.iter_unpack(part):
            if digest in seen:
                found.append(line)
            seen.add(digest)
    return sorted(found)


def repeated_id_error(line: int) -> LineError:
    message = "The custom_id of this line occurs in an earlier line; each line needs its own."
    return LineError("duplicate_custom_id", message, line, "custom_id")
