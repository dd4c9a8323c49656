"""vLLM on Neuron as the agent sees it: a command line, after what fetches weights from S3. It starts nothing."""

from pathlib import Path

from engine_agent.engines.base import (
    EngineContext,
    EngineUnavailable,
    Launch,
    member_args,
    member_environment,
    member_health_url,
)
from engine_agent.engines.neuron.rank import NEURON_FOLDER, rank_args, rank_environment
from engine_agent.engines.plan_artifacts import after_fetching, local_folder, read_in_place
from engine_agent.protocol.messages import Assignment, EnginePlan

ENVIRONMENT = "engines/neuron"
"""The engine's environment in the cache: a virtual environment of the Neuron SDK, or a link to the image's own."""


class NeuronAdapter:
    """Runs `python -m engine_agent.engines.neuron.serve` in the Python of the Neuron SDK."""

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
        argv = (
            *(str(python), "-m", "engine_agent.engines.neuron.serve"),
            *member_args(assignment, context),
            *("--host", context.host),
            *("--join-timeout-s", f"{plan.ready_timeout_s:g}"),
            *("--served-model", plan.served_model),
            *("--model-dir", str(local_folder(plan.artifact, context.cache))),
            *("--digest", plan.artifact.digest),
            *_draft_args(plan, context.cache),
            "--",
            *rank_args(assignment, context.cache),
        )
        env = {**rank_environment(assignment, context), **member_environment(assignment, context)}
        writes = (context.home / NEURON_FOLDER,)
        launch = Launch(argv=argv, env=env, reads=read_in_place(plan), writes=writes)
        return after_fetching(launch, assignment, context)

    def health_url(self, assignment: Assignment, context: EngineContext) -> str:
        return member_health_url(assignment, context)


def _draft_args(plan: EnginePlan, cache: Path) -> tuple[str, ...]:
    return () if plan.draft is None else ("--draft", str(local_folder(plan.draft, cache)), plan.draft.digest)


def installed_python(cache: Path) -> Path | None:
    """The interpreter of Neuron's environment in a cache, or None while there is none."""
    python = cache / ENVIRONMENT / "bin" / "python"
    return python if python.exists() else None
