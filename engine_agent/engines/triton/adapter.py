"""Triton for the agent: the launcher's command line in the engine's Python. Features that it lacks are refused by name:
cells of several nodes, adapters, draft models."""

from engine_agent.engines.base import (
    EngineContext,
    Launch,
    after_fetching,
    engine_python,
    local_folder,
    member_environment,
    member_health_url,
    plain_artifact,
    read_in_place,
)
from engine_agent.protocol.messages import Assignment
from engine_agent.protocol.ports import ENGINE, ENGINE_ADMIN, ENGINE_METRICS

INSTALL = "run python -m engine_agent.engines.triton.environment install"
FOLDER = "triton"
"""In a node's home: the model repository."""


class TritonAdapter:
    """Runs `python -m engine_agent.engines.triton.serve` in the Python that has Triton."""

    name = "triton"

    def launch(self, assignment: Assignment, context: EngineContext) -> Launch:
        """See `EngineAdapter.launch`; the plan's `args` are the options in `TRITON` of
        `engine_agent.protocol.engine_options`."""
        plan = assignment.plan
        python = engine_python(context, self.name, "Triton", INSTALL)
        artifact = plain_artifact(assignment, self.name)
        folder = context.home / FOLDER
        argv = (
            *(str(python), "-m", "engine_agent.engines.triton.serve"),
            *("--node-id", context.node_id),
            *("--model-dir", str(local_folder(artifact, context.cache))),
            *("--digest", artifact.digest),
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
        return member_health_url(assignment, context)
