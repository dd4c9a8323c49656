"""Triton for the agent: the launcher's command line in the engine's Python. Features that it lacks are refused by name:
cells of several nodes, adapters, draft models."""

from engine_agent.engines.base import (
    LOOPBACK,
    EngineContext,
    EngineUnavailable,
    Launch,
    after_fetching,
    follower_count,
    local_folder,
    member_environment,
    read_in_place,
)
from engine_agent.protocol.messages import Assignment
from engine_agent.protocol.ports import ENGINE, ENGINE_ADMIN, ENGINE_METRICS

FOLDER = "triton"
"""In a node's home: the model repository."""


class TritonAdapter:
    """Runs `python -m engine_agent.engines.triton.serve` in the Python that has Triton."""

    name = "triton"

    def launch(self, assignment: Assignment, context: EngineContext) -> Launch:
        """See `EngineAdapter.launch`; the plan's `args` are the options in `TRITON` of
        `engine_agent.protocol.engine_options`."""
        plan = assignment.plan
        python = context.engine_pythons.get(self.name)
        if python is None:
            raise EngineUnavailable(
                "Triton is not installed on this node; run python -m engine_agent.engines.triton.environment install"
            )
        if follower_count(assignment) > 0:
            raise EngineUnavailable("engine triton runs on one node; this cell has several")
        if plan.adapters or plan.draft is not None:
            what = f"the adapter {plan.adapters[0].name}" if plan.adapters else "a draft model"
            raise EngineUnavailable(f"engine triton serves a model as it is, and the plan has {what}")
        if plan.artifact is None:
            raise EngineUnavailable(f"the plan of {plan.served_model} names no artifact to load")
        folder = context.home / FOLDER
        argv = (
            *(str(python), "-m", "engine_agent.engines.triton.serve"),
            *("--node-id", context.node_id),
            *("--model-dir", str(local_folder(plan.artifact, context.cache))),
            *("--digest", plan.artifact.digest),
            *("--served-model", plan.served_model),
            *("--folder", str(folder)),
            *("--port", str(context.port_base + ENGINE)),
            *("--server-port", str(context.port_base + ENGINE_ADMIN)),
            *("--metrics-port", str(context.port_base + ENGINE_METRICS)),
            *("--", *plan.args),
        )
        environment = member_environment(assignment, context)
        launch = Launch(argv, environment, reads=read_in_place(plan), writes=(folder,))
        return after_fetching(launch, assignment, context)

    def health_url(self, assignment: Assignment, context: EngineContext) -> str:
        """See `EngineAdapter.health_url`: 503 while the model is loaded."""
        return f"http://{LOOPBACK}:{context.port_base + ENGINE}/health"
