"""The interface of an engine for the agent: a command line, its environment, and a health URL; and where artifacts of a
plan are on a node. Adapters compute these from an assignment as pure functions: they touch no process, file or
socket."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable
from urllib.parse import unquote, urlsplit

from engine_agent.engines.artifacts import entry_of
from engine_agent.protocol.messages import Artifact, Assignment, EnginePlan
from engine_agent.protocol.ports import ENGINE, ENGINE_ADMIN, rendezvous_port
from engine_agent.protocol.states import MemberRole
from engine_agent.protocol.strict_json import strict_loads

LOOPBACK = "127.0.0.1"
NODE_ID_VARIABLE = "SWITCHYARD_NODE_ID"
CELL_SECRET_VARIABLE = "SWITCHYARD_CELL_SECRET"  # noqa: S105  (the name of a variable)
CELL_CERTIFICATE_VARIABLE = "SWITCHYARD_CELL_CERTIFICATE"
"""The certificate and key, PEM, that a leader serves its followers with."""


class EngineUnavailable(Exception):
    """This node cannot run the engine of the assignment; the text states cause and remedy."""


@dataclass(frozen=True)
class EngineContext:
    """Facts that only the node knows. `host` is the address that its cell proxy and leader listen on, `port_base` its
    first port, `repo_root` the folder of the package `engine_agent`, `engine_pythons` the interpreter of each installed
    engine environment by engine, `cache` the folder for downloads from S3, shared by all nodes of the machine."""

    node_id: str
    home: Path
    host: str
    port_base: int
    repo_root: Path
    engine_pythons: Mapping[str, Path]
    cache: Path


@dataclass(frozen=True, slots=True)
class CompileFolders:
    """Where an engine keeps what it compiles, relative to the folder of its compile cache. `variables` tell it the
    folders; of `shared` ones the content is of use on other nodes. `is_one_engines`: several engines must not use one
    folder at the same time."""

    variables: Mapping[str, str]
    shared: tuple[str, ...]
    is_one_engines: bool = False


@dataclass(frozen=True)
class Launch:
    """How to start an engine process; `env` is added to the agent's environment. `reads` and `writes` are folders
    besides its installation, `programs` those that the first program executes. `compiles` is None if this engine
    compiles nothing that is worth keeping."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    reads: tuple[Path, ...] = ()
    writes: tuple[Path, ...] = ()
    programs: tuple[Path, ...] = ()
    compiles: CompileFolders | None = None


class EngineAdapter(Protocol):
    @property
    def name(self) -> str:
        """The value of `EnginePlan.engine` for this engine."""

    def launch(self, assignment: Assignment, context: EngineContext) -> Launch:
        """Returns how to start this rank's engine process. Raises EngineUnavailable if this node cannot run it."""

    def health_url(self, assignment: Assignment, context: EngineContext) -> str:
        """Returns the URL that answers 200 while this rank's engine can work. Raises EngineUnavailable if this node
        cannot run it."""


@runtime_checkable
class MeasuresSteps(Protocol):
    """An adapter whose ranks report what each of them computed."""

    def steps_url(self, assignment: Assignment, context: EngineContext) -> str:
        """Returns the URL of this rank's `StepTimes` as JSON; it does not answer 200 while there are none."""


@runtime_checkable
class TunesProxy(Protocol):
    """An adapter whose engine needs more of the cell proxy than its address."""

    def proxy_options(self, plan: EnginePlan) -> tuple[str, ...]:
        """Returns options of `python -m engine_agent.cell_proxy`."""


ENVIRONMENT_OF_OPERATOR = "create a virtual environment, or a link to one, at engines/{engine} in the cache"
"""Remedy for an engine without an installer."""


def engine_python(context: EngineContext, engine: str, title: str, remedy: str = ENVIRONMENT_OF_OPERATOR) -> Path:
    """Returns the interpreter of an engine's environment. Raises EngineUnavailable with the remedy if this node has
    none."""
    if python := context.engine_pythons.get(engine):
        return python
    raise EngineUnavailable(f"{title} is not installed on this node; {remedy.format(engine=engine)}")


def member_args(assignment: Assignment, context: EngineContext) -> tuple[str, ...]:
    """Returns the options that every engine takes: this rank's place in the cell, its ports and its leader. Engines
    serve on loopback, for the cell proxy on the same node."""
    return (
        *("--node-id", context.node_id),
        *("--cell", assignment.cell),
        *("--generation", str(assignment.generation)),
        *("--rank", str(assignment.rank)),
        *("--role", assignment.role.value),
        *("--port", str(context.port_base + ENGINE)),
        *("--admin-port", str(context.port_base + ENGINE_ADMIN)),
        *("--leader", leader_endpoint(assignment, context)),
        *("--followers", str(follower_count(assignment))),
    )


def model_args(assignment: Assignment, context: EngineContext) -> tuple[str, ...]:
    """Returns the options of vLLM's launchers: the node's address, the limit for followers, the model and its draft.
    Raises EngineUnavailable if the plan names no artifact, or one that cannot be fetched."""
    plan = assignment.plan
    if plan.artifact is None:
        raise EngineUnavailable(f"the plan of {plan.served_model} names no artifact to load")
    draft = () if plan.draft is None else ("--draft", str(local_folder(plan.draft, context.cache)), plan.draft.digest)
    return (
        *("--host", context.host),
        *("--join-timeout-s", f"{plan.ready_timeout_s:g}"),
        *("--served-model", plan.served_model),
        *("--model-dir", str(local_folder(plan.artifact, context.cache))),
        *("--digest", plan.artifact.digest),
        *draft,
    )


def member_environment(assignment: Assignment, context: EngineContext) -> dict[str, str]:
    """Returns the variables of the plan and of the member; the member's take precedence."""
    return {
        **assignment.plan.env,
        "PYTHONPATH": str(context.repo_root),
        NODE_ID_VARIABLE: context.node_id,
        CELL_SECRET_VARIABLE: assignment.secret,
    }


def member_health_url(assignment: Assignment, context: EngineContext) -> str:
    """Returns `/health` of the leader's API; a follower has no API and answers on its administration port."""
    return f"http://{LOOPBACK}:{member_health_port(assignment, context)}/health"


def member_health_port(assignment: Assignment, context: EngineContext) -> int:
    return context.port_base + (ENGINE if assignment.role is MemberRole.LEADER else ENGINE_ADMIN)


def follower_count(assignment: Assignment) -> int:
    ranks = {peer.rank for peer in assignment.peers} | {assignment.rank}
    return len(ranks - {0})


def leader_endpoint(assignment: Assignment, context: EngineContext) -> str:
    """Returns `host:port` where the followers of this generation connect to their leader. Raises EngineUnavailable if
    the assignment names no leader."""
    host, port_base = leader_place(assignment, context)
    return f"{host}:{rendezvous_port(port_base, assignment.generation)}"


def leader_place(assignment: Assignment, context: EngineContext) -> tuple[str, int]:
    """Returns address and first port of the leader's node. Raises EngineUnavailable if the assignment names none."""
    if assignment.rank == 0:
        return context.host, context.port_base
    for peer in assignment.peers:
        if peer.rank == 0:
            return peer.address, peer.port_base
    raise EngineUnavailable(f"cell {assignment.cell} names no peer of rank 0, so rank {assignment.rank} has no leader")


def plain_artifact(assignment: Assignment, engine: str, *, one_node: bool = True) -> Artifact:
    """Returns the weights of an engine that serves a model as it is. Raises EngineUnavailable if the plan names none,
    has adapters or a draft model, or the cell has several nodes and the engine runs on one."""
    plan = assignment.plan
    if one_node and follower_count(assignment) > 0:
        raise EngineUnavailable(f"engine {engine} runs on one node; this cell has several")
    if plan.adapters or plan.draft is not None:
        what = f"the adapter {plan.adapters[0].name}" if plan.adapters else "a draft model"
        raise EngineUnavailable(f"engine {engine} serves a model as it is, and the plan has {what}")
    if plan.artifact is None:
        raise EngineUnavailable(f"the plan of {plan.served_model} names no artifact to load")
    return plan.artifact


SPECULATION = "--speculative-config"


def local_folder(artifact: Artifact, cache: Path) -> Path:
    """Returns the folder of an artifact, which exists once it is fetched into the machine's `cache`. Raises
    EngineUnavailable if its URI is neither `file:///…` nor `s3://bucket/…`, or its digest is malformed."""
    parts = urlsplit(artifact.uri)
    if parts.scheme == "s3" and parts.netloc:
        try:
            return entry_of(artifact.digest, cache).folder
        except ValueError as error:
            raise EngineUnavailable(f"artifact {artifact.uri} cannot be fetched: {error}") from error
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path.startswith("/"):
        return Path(unquote(parts.path))
    raise EngineUnavailable(
        f"artifact {artifact.uri} cannot be fetched; it must be file:///absolute/path or s3://bucket/…"
    )


def read_in_place(plan: EnginePlan) -> tuple[Path, ...]:
    """Returns the node's folders that are read directly: those of artifacts that do not come from S3."""
    return tuple(local_folder(each, Path()) for each in plan.artifacts if not is_fetched(each))


def after_fetching(launch: Launch, assignment: Assignment, context: EngineContext) -> Launch:
    """Returns the launch, preceded by the fetch of the plan's artifacts from S3 if there are any. Raises
    EngineUnavailable if an artifact's URI or digest is malformed."""
    fetched = [each for each in dict.fromkeys(assignment.plan.artifacts) if is_fetched(each)]
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
    """Returns the plan's arguments with the folder of its draft model on this node. Raises EngineUnavailable if the
    plan's JSON, or the draft's URI or digest, is malformed."""
    if plan.draft is None or SPECULATION not in args:
        return tuple(args)
    stated = json_option(args, SPECULATION)
    return with_json_option(args, SPECULATION, stated | {"model": str(local_folder(plan.draft, cache))})


def json_option(args: Sequence[str], name: str) -> dict[str, Any]:
    """Returns the value of a JSON option in a plan's arguments; empty if it is not given. Raises EngineUnavailable if
    it is not a JSON object."""
    if name not in args:
        return {}
    text = args[args.index(name) + 1]
    try:
        value: Any = strict_loads(text)
    except ValueError as error:
        raise EngineUnavailable(f"the plan's {name} is not JSON ({error}): {text[:80]}") from error
    if not isinstance(value, dict):
        raise EngineUnavailable(f"the plan's {name} is not a JSON object: {text[:80]}")
    return value


def with_json_option(args: Sequence[str], name: str, value: dict[str, Any]) -> tuple[str, ...]:
    """Returns the arguments with another value of a JSON option, appended if it is not given."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    position = args.index(name) + 1 if name in args else 0
    return (*args[:position], text, *args[position + 1 :]) if position else (*args, name, text)


def is_fetched(artifact: Artifact) -> bool:
    """Whether an artifact is in S3, from where any process of the node can fetch it."""
    return urlsplit(artifact.uri).scheme == "s3"
