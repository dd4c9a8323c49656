"""Where the artifacts of a plan lie on a node, and what comes before an engine whose artifacts come from S3. Pure."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from engine_agent.engines.artifact_cache import entry_of
from engine_agent.engines.base import EngineContext, EngineUnavailable, Launch, member_health_port
from engine_agent.protocol.messages import Artifact, Assignment, EnginePlan
from engine_agent.protocol.strict_json import strict_loads

SPECULATION = "--speculative-config"


def local_folder(artifact: Artifact, cache: Path) -> Path:
    """Where an artifact lies, or will lie once it is fetched into the machine's `cache`.

    Raises:
        EngineUnavailable: its URI is neither `file:///…` nor `s3://bucket/…`, or its digest is none.
    """
    parts = urlsplit(artifact.uri)
    if parts.scheme == "s3" and parts.netloc:
        try:
            return entry_of(artifact.digest, cache).folder
        except ValueError as error:
            raise EngineUnavailable(f"artifact {artifact.uri} cannot be had: {error}") from error
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path.startswith("/"):
        return Path(unquote(parts.path))
    raise EngineUnavailable(f"artifact {artifact.uri} cannot be had; it must be file:///absolute/path or s3://bucket/…")


def read_in_place(plan: EnginePlan) -> tuple[Path, ...]:
    """Folders of the node that are read where they lie: those of artifacts that do not come from S3."""
    return tuple(local_folder(each, Path()) for each in plan.artifacts if not _is_fetched(each))


def after_fetching(launch: Launch, assignment: Assignment, context: EngineContext) -> Launch:
    """The launch, preceded by what fetches the artifacts of its plan; unchanged where none comes from S3.

    Raises:
        EngineUnavailable: an artifact's URI or digest is none.
    """
    fetched = [each for each in dict.fromkeys(assignment.plan.artifacts) if _is_fetched(each)]
    for each in fetched:
        local_folder(each, context.cache)
    if not fetched:
        return launch
    argv = (
        *(sys.executable, "-m", "engine_agent.engines.launch_artifacts"),
        *("--cache", str(context.cache)),
        *("--health-port", str(member_health_port(assignment, context))),
        *(word for each in fetched for word in ("--fetch", each.uri, each.digest)),
        *("--", *launch.argv),
    )
    programs = (Path(launch.argv[0]), *launch.programs)
    return replace(launch, argv=argv, writes=(context.cache, *launch.writes), programs=programs)


def with_local_draft(args: Sequence[str], plan: EnginePlan, cache: Path) -> tuple[str, ...]:
    """The plan's arguments with its draft model, if it has one, where that lies on this node.

    Raises:
        EngineUnavailable: the plan's JSON is none, or the draft's URI or digest.
    """
    if plan.draft is None or SPECULATION not in args:
        return tuple(args)
    stated = json_option(args, SPECULATION)
    return with_json_option(args, SPECULATION, stated | {"model": str(local_folder(plan.draft, cache))})


def json_option(args: Sequence[str], name: str) -> dict[str, Any]:
    """What a JSON option of a plan's arguments states; empty where it is not given.

    Raises:
        EngineUnavailable: it is no JSON object.
    """
    if name not in args:
        return {}
    text = args[args.index(name) + 1]
    try:
        value: Any = strict_loads(text)
    except ValueError as error:
        raise EngineUnavailable(f"the plan's {name} is no JSON ({error}): {text[:80]}") from error
    if not isinstance(value, dict):
        raise EngineUnavailable(f"the plan's {name} is no JSON object: {text[:80]}")
    return value


def with_json_option(args: Sequence[str], name: str, value: dict[str, Any]) -> tuple[str, ...]:
    """The arguments with another value of a JSON option, appended where it is not given."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    position = args.index(name) + 1 if name in args else 0
    return (*args[:position], text, *args[position + 1 :]) if position else (*args, name, text)


def _is_fetched(artifact: Artifact) -> bool:
    return urlsplit(artifact.uri).scheme == "s3"
