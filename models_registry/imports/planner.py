"""Decides what an import fetches: parses its source, picks the files that an engine needs, and rejects hostile
listings. Pure: it opens no connection and no file."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from hashlib import sha256
from urllib.parse import quote

from engine_agent.protocol.manifest import MANIFEST_NAME, is_sha256, wrong_path
from kernel.tones import Tone
from models_registry.artifacts.planner import size_words
from models_registry.versions.planning.checkpoint import ModelShape


class CannotImport(Exception):
    """The import can never succeed as requested. The text names the cause and the remedy."""


class ImportState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


IMPORT_TONE: dict[ImportState, Tone] = {
    ImportState.QUEUED: Tone.IDLE,
    ImportState.RUNNING: Tone.MOVING,
    ImportState.DONE: Tone.OK,
    ImportState.FAILED: Tone.BAD,
    ImportState.CANCELLED: Tone.IDLE,
}
IMPORT_OPEN = frozenset({ImportState.QUEUED, ImportState.RUNNING})


class HubKind(StrEnum):
    """The scheme of a source. Each kind has an API."""

    HF = "hf"
    MODELSCOPE = "modelscope"


DEFAULT_REVISION: Mapping[HubKind, str] = {HubKind.HF: "main", HubKind.MODELSCOPE: "master"}
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_SOURCE = re.compile(rf"(hf|modelscope)://({_NAME}/{_NAME})(?:@([A-Za-z0-9][A-Za-z0-9._/-]{{0,127}}))?")
SOURCE_RULE = "it must be hf://ORG/NAME@REVISION or modelscope://ORG/NAME@REVISION; REVISION is a branch, tag or commit"
_REFERENCE = re.compile(r"[-A-Za-z0-9_]{1,96}@[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")


@dataclass(frozen=True, slots=True)
class Repository:
    """`revision` as requested: a branch, a tag or a commit."""

    hub: HubKind
    name: str
    revision: str

    def __str__(self) -> str:
        return f"{self.hub}://{self.name}@{self.revision}"


def parse_source(source: str) -> Repository:
    """Raises CannotImport if this is not a source."""
    found = _SOURCE.fullmatch(source)
    if found is None or ".." in source or "//" in source.partition("://")[2] or source.endswith("/"):
        raise CannotImport(f"source is {source[:200]!r}; {SOURCE_RULE}")
    hub = HubKind(found.group(1))
    return Repository(hub, found.group(2), found.group(3) or DEFAULT_REVISION[hub])


def is_commit(text: str) -> bool:
    return _COMMIT.fullmatch(text) is not None


def is_reference(text: str) -> bool:
    """Whether this may be a new `model@version`."""
    return _REFERENCE.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class ListedFile:
    """A file of a repository. `sha256`: of its content, or empty if the hub lists none; then `blob` is its git object
    ID. `revision`: the commit to download it from, if the hub pins each file."""

    path: str
    size: int
    sha256: str = ""
    blob: str = ""
    revision: str = ""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A repository at one commit."""

    revision: str
    files: tuple[ListedFile, ...]
    license: str = ""
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ImportLimits:
    """`listed` files may be in the repository, `files` and `bytes` may be imported."""

    bytes: int
    listed: int = 10_000
    files: int = 1_000
    pickles: bool = False


_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
"""Reading these with Python's pickle can run code."""
_WEIGHTS = (".safetensors", ".gguf", *_PICKLES)
_SMALL = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", "LICENSE*", "NOTICE*")
"""Configuration, tokenizer and licence, in the repository's top folder. Never Python code."""
_MOST_SMALL_BYTES = 256 * 1024**2
_MAIN = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
"""What transformers and vLLM load; some repositories also have the same weights as `consolidated.safetensors`."""
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.[a-z]+)")
_SHOWN = 5


def choose_files(listed: Sequence[ListedFile], pattern: str, limits: ImportLimits) -> tuple[ListedFile, ...]:
    """Returns the weights, configuration, tokenizer and licence, sorted by path. `pattern` is a glob for the weights;
    empty: safetensors, or the only GGUF. Raises CannotImport for a hostile listing, missing or ambiguous weights,
    pickles that are not allowed, and too many or too large files."""
    _check_listing(listed, limits)
    top = [file for file in listed if "/" not in file.path and file.path != MANIFEST_NAME]
    weights = _matching(listed, pattern, limits) if pattern else _usual(top, limits)
    _check_parts(weights)
    small = [file for file in top if _is_small(file)]
    chosen = {file.path: file for file in (*small, *weights)}
    total = sum(file.size for file in chosen.values())
    if len(chosen) > limits.files:
        raise CannotImport(f"{len(chosen)} files are needed; the limit is {limits.files}")
    if total > limits.bytes:
        raise CannotImport(
            f"the files have {size_words(total)}; the limit is {size_words(limits.bytes)} (SWITCHYARD_ARTIFACT_MAX_GIB)"
        )
    return tuple(chosen[path] for path in sorted(chosen))


def _check_listing(listed: Sequence[ListedFile], limits: ImportLimits) -> None:
    if len(listed) > limits.listed:
        raise CannotImport(f"the repository has more than {limits.listed} files")
    seen: set[str] = set()
    for file in listed:
        if file.path in seen:
            raise CannotImport(f"the hub lists {file.path[:200]!r} twice")
        seen.add(file.path)
        if file.path != MANIFEST_NAME and (wrong := wrong_path(file.path)):
            raise CannotImport(f"the hub lists {file.path[:200]!r}, {wrong}")
        if file.size < 0:
            raise CannotImport(f"the hub lists {file.path[:200]!r} with {file.size} bytes")
        if not (is_sha256(file.sha256) or (not file.sha256 and is_commit(file.blob))):
            raise CannotImport(f"the hub lists {file.path[:200]!r} without a SHA-256 or git object ID to verify it by")
    for path in seen:
        above = path.rpartition("/")[0]
        while above and above not in seen:
            above = above.rpartition("/")[0]
        if above:
            raise CannotImport(f"the hub lists {above[:200]!r} as a file and as the folder of {path[:200]!r}")


def _is_small(file: ListedFile) -> bool:
    return any(fnmatchcase(file.path, one) for one in _SMALL) and file.size <= _MOST_SMALL_BYTES


def _matching(listed: Sequence[ListedFile], pattern: str, limits: ImportLimits) -> list[ListedFile]:
    weights = [file for file in listed if file.path.endswith(_WEIGHTS) and fnmatchcase(file.path, pattern)]
    if not weights:
        there = _some([file for file in listed if file.path.endswith(_WEIGHTS)])
        raise CannotImport(f"no weights match {pattern!r}; the repository has {there}")
    _check_one_gguf([file for file in weights if file.path.endswith(".gguf")])
    return _allowed(weights, limits)


def _usual(top: Sequence[ListedFile], limits: ImportLimits) -> list[ListedFile]:
    if tensors := [file for file in top if file.path.endswith(".safetensors")]:
        main = [file for file in tensors if _MAIN.fullmatch(file.path)] or tensors
        return [file for file in main if _PART.fullmatch(file.path)] or main
    if ggufs := [file for file in top if file.path.endswith(".gguf")]:
        _check_one_gguf(ggufs)
        return ggufs
    pickles = [file for file in top if file.path.endswith(_PICKLES)]
    if not pickles:
        raise CannotImport("the repository has no safetensors and no GGUF in its top folder; name weights by a pattern")
    return _allowed(pickles, limits)


def _allowed(weights: list[ListedFile], limits: ImportLimits) -> list[ListedFile]:
    pickles = [file for file in weights if file.path.endswith(_PICKLES)]
    if pickles and not limits.pickles:
        raise CannotImport(
            f"{_some(pickles)} can run code when loaded, so pickles are refused: import a conversion to safetensors, "
            "or set SWITCHYARD_IMPORT_PICKLES=1"
        )
    return weights


def _check_one_gguf(files: Sequence[ListedFile]) -> None:
    """Each GGUF is a whole model; parts of one count as one."""
    if len({part[1] if (part := _PART.fullmatch(file.path)) else file.path for file in files}) > 1:
        raise CannotImport(f"there are several GGUF files: {_some(files)}; name one with a pattern")


def _check_parts(weights: Iterable[ListedFile]) -> None:
    there = {file.path for file in weights}
    for name, count, suffix in sorted({(p[1], p[3], p[4]) for path in there if (p := _PART.fullmatch(path))}):
        numbers = range(1, int(count) + 1)
        missing = next((n for n in numbers if f"{name}-{n:05d}-of-{count}{suffix}" not in there), None)
        if missing is not None:
            raise CannotImport(f"part {missing} of {int(count)} of {name}{suffix} is missing in the repository")


def _some(files: Sequence[ListedFile]) -> str:
    names = ", ".join(file.path[:120] for file in files[:_SHOWN])
    more = len(files) - _SHOWN
    return (names or "no weights") + (f" and {more} more" if more > 0 else "")


def usual_engine(paths: Iterable[str]) -> str:
    """The engine that serves these files."""
    return "llama-cpp" if any(path.endswith(".gguf") for path in paths) else "vllm"


def artifact_path(repository: Repository, revision: str, pattern: str) -> str:
    """The artifact's path in the store. Another choice of files of the same commit has another path."""
    choice = f"-{sha256(pattern.encode()).hexdigest()[:8]}" if pattern else ""
    return f"{repository.hub}/{repository.name}/{quote(revision, safe='')}{choice}"


RETRY_S = (5.0, 15.0, 60.0, 300.0, 900.0)
"""Pauses after failures of the hub or the store without any progress; then the import fails."""


def retry_after_s(troubles: int) -> float | None:
    """Seconds until the next try after so many failures in a row, or None to give up."""
    return RETRY_S[troubles - 1] if troubles <= len(RETRY_S) else None


def draft_numbers(shape: ModelShape) -> dict[str, str | int]:
    """What a draft states of a model, by column, and its type. Leaves out what is unknown."""
    known: dict[str, str | int] = {
        "model_type": shape.model_type,
        "attention_heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "layers": shape.layers,
        "context_length": shape.longest,
    }
    return {name: value for name, value in known.items() if value}
