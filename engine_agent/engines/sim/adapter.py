"""The simulator for the agent: its command line on every rank."""

import sys
from pathlib import Path

from engine_agent.engines.base import (
    LOOPBACK,
    EngineContext,
    Launch,
    after_fetching,
    member_args,
    member_environment,
    member_health_url,
)
from engine_agent.protocol.messages import Assignment
from engine_agent.protocol.ports import ENGINE_ADMIN, KV_TRANSFER
from engine_agent.protocol.states import CellRole


class SimAdapter:
    """Runs `python -m engine_agent.engines.sim`, in the agent's Python unless the context names another."""

    name = "sim"

    def launch(self, assignment: Assignment, context: EngineContext) -> Launch:
        """See `EngineAdapter.launch`; the plan's `args` are parameters of the time model. It loads no weights, but
        fetches those in S3 like any engine."""
        python = context.engine_pythons.get(self.name, Path(sys.executable))
        argv = (
            *(str(python), "-m", "engine_agent.engines.sim"),
            *member_args(assignment, context),
            *("--served-model", assignment.plan.served_model),
            *(word for each in assignment.plan.adapters for word in ("--adapter", each.name)),
            *(word for modality in assignment.plan.modalities for word in ("--modality", modality)),
            *_role(assignment, context),
            *assignment.plan.args,
        )
        launch = Launch(argv=argv, env=member_environment(assignment, context))
        return after_fetching(launch, assignment, context)

    def health_url(self, assignment: Assignment, context: EngineContext) -> str:
        return member_health_url(assignment, context)

    def steps_url(self, assignment: Assignment, context: EngineContext) -> str:
        """See `MeasuresSteps.steps_url`; every rank answers on its administration port."""
        return f"http://{LOOPBACK}:{context.port_base + ENGINE_ADMIN}/steps"


def _role(assignment: Assignment, context: EngineContext) -> tuple[str, ...]:
    if assignment.cell_role is CellRole.MIXED:
        return ()
    where = ("--kv-endpoint", f"{context.host}:{context.port_base + KV_TRANSFER}")
    return ("--cell-role", assignment.cell_role, *(where if assignment.cell_role is CellRole.PREFILL else ()))
