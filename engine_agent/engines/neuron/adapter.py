"""vLLM on Neuron as the agent sees it: a command line that fetches weights and becomes vLLM. It starts nothing."""

import sys
from pathlib import Path

from engine_agent.engines.base import (
    EngineContext,
    EngineUnavailable,
    Launch,
    member_args,
    member_environment,
    member_health_url,
)
from engine_agent.engines.neuron.rank import NEURON_FOLDER, local_folder, rank_args, rank_environment
from engine_agent.protocol.messages import Assignment, EnginePlan

ENVIRONMENT = "engines/neuron"
"""The engine's environment in the cache: a virtual environment of the Neuron SDK, or a link to the image's own."""


class NeuronAdapter:
    """Runs `python -m engine_agent.engines.neuron.launch` in the agent's Python, which becomes the engine's."""

    name = "neuron"

    def launch(self, assignment: Assignment, context: EngineContext) -> Launch:
        """See `EngineAdapter.launch`; the plan's `args` are vLLM's own options, `--additional-config` NxDI's."""
        python = context.engine_pythons.get(self.name)
        if python is None:
            raise EngineUnavailable(
                f"Neuron's vLLM is not installed on this node; make a virtual environment of it, or a link to one, at "
                f"{ENVIRONMENT} in the cache"
            )
        plan = assignment.plan
        if plan.artifact is None:
            raise EngineUnavailable(f"the plan of {plan.served_model} names no artifact to load")
        artifacts = context.home / "artifacts"
        argv = (
            *(sys.executable, "-m", "engine_agent.engines.neuron.launch"),
            *("--python", str(python)),
            *("--artifacts", str(artifacts)),
            *_fetch_args(plan),
            "--",
            *member_args(assignment, context),
            *("--host", context.host),
            *("--join-timeout-s", f"{plan.ready_timeout_s:g}"),
            *("--served-model", plan.served_model),
            *("--model-dir", str(local_folder(plan.artifact, artifacts))),
            *("--digest", plan.artifact.digest),
            *_draft_args(plan, artifacts),
            "--",
            *rank_args(assignment, artifacts),
        )
        env = {**rank_environment(assignment, context), **member_environment(assignment, context)}
        reads = (local_folder(each, artifacts) for each in (plan.artifact, plan.draft) if each is not None)
        writes = (artifacts, context.home / NEURON_FOLDER)
        return Launch(argv=argv, env=env, reads=tuple(reads), writes=writes, programs=(python,))

    def health_url(self, assignment: Assignment, context: EngineContext) -> str:
        """See `EngineAdapter.health_url`."""
        return member_health_url(assignment, context)


def _fetch_args(plan: EnginePlan) -> tuple[str, ...]:
    """Weights to fetch before vLLM starts: the model's and, if there is one, its draft's."""
    artifacts = [artifact for artifact in (plan.artifact, plan.draft) if artifact is not None]
    return tuple(arg for artifact in artifacts for arg in ("--fetch", artifact.uri, artifact.digest))


def _draft_args(plan: EnginePlan, artifacts: Path) -> tuple[str, ...]:
    return () if plan.draft is None else ("--draft", str(local_folder(plan.draft, artifacts)), plan.draft.digest)


def installed_python(cache: Path) -> Path | None:
    """The interpreter of Neuron's environment in a cache, or None while there is none."""
    python = cache / ENVIRONMENT / "bin" / "python"
    return python if python.exists() else None
