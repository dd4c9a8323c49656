"""The simulator as the agent sees it: its command line on every rank. It starts nothing."""

import sys
from pathlib import Path

from engine_agent.engines.base import (
    CELL_SECRET_VARIABLE,
    NODE_ID_VARIABLE,
    EngineContext,
    Launch,
    follower_count,
    leader_endpoint,
)
from engine_agent.protocol.messages import Assignment
from engine_agent.protocol.ports import ENGINE, ENGINE_ADMIN
from engine_agent.protocol.states import MemberRole


class SimAdapter:
    """Runs `python -m engine_agent.engines.sim`, in the agent's own Python unless the context names another."""

    name = "sim"

    def launch(self, assignment: Assignment, context: EngineContext) -> Launch:
        """See `EngineAdapter.launch`; the plan's `args` are parameters of the time model."""
        python = context.engine_pythons.get(self.name, Path(sys.executable))
        argv = (
            *(str(python), "-m", "engine_agent.engines.sim"),
            *("--node-id", context.node_id),
            *("--cell", assignment.cell),
            *("--generation", str(assignment.generation)),
            *("--rank", str(assignment.rank)),
            *("--role", assignment.role.value),
            *("--host", context.host),
            *("--port", str(context.port_base + ENGINE)),
            *("--admin-port", str(context.port_base + ENGINE_ADMIN)),
            *("--served-model", assignment.plan.served_model),
            *("--leader", leader_endpoint(assignment, context)),
            *("--followers", str(follower_count(assignment))),
            *assignment.plan.args,
        )
        env = {
            **assignment.plan.env,
            "PYTHONPATH": str(context.repo_root),
            NODE_ID_VARIABLE: context.node_id,
            CELL_SECRET_VARIABLE: assignment.secret,
        }
        return Launch(argv=argv, env=env)

    def health_url(self, assignment: Assignment, context: EngineContext) -> str:
        """See `EngineAdapter.health_url`; a follower has no model HTTP and answers on its administration port."""
        if assignment.role is MemberRole.LEADER:
            return f"http://{context.host}:{context.port_base + ENGINE}/health"
        return f"http://127.0.0.1:{context.port_base + ENGINE_ADMIN}/health"  # administration listens on loopback only

    def steps_url(self, context: EngineContext) -> str:
        """See `MeasuresSteps.steps_url`; every rank answers on its administration port."""
        return f"http://127.0.0.1:{context.port_base + ENGINE_ADMIN}/steps"
