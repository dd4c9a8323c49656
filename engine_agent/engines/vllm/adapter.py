"""vLLM as the agent sees it: the launcher's command line in the engine's own Python. It starts nothing."""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from engine_agent.engines.base import (
    CELL_SECRET_VARIABLE,
    NODE_ID_VARIABLE,
    EngineContext,
    EngineUnavailable,
    Launch,
    follower_count,
    leader_endpoint,
)
from engine_agent.engines.vllm.cell.follower_health import LOOPBACK
from engine_agent.protocol.messages import Artifact, Assignment
from engine_agent.protocol.ports import ENGINE, ENGINE_ADMIN
from engine_agent.protocol.states import MemberRole


class VllmAdapter:
    """Runs `python -m engine_agent.engines.vllm.serve` in the Python that has vLLM installed."""

    name = "vllm"

    def launch(self, assignment: Assignment, context: EngineContext) -> Launch:
        """See `EngineAdapter.launch`; the plan's `args` are vLLM's own options."""
        python = context.engine_pythons.get(self.name)
        if python is None:
            raise EngineUnavailable(
                "vLLM is not installed on this node; run python -m engine_agent.engines.vllm.environment install"
            )
        artifact = assignment.plan.artifact
        if artifact is None:
            raise EngineUnavailable(f"the plan of {assignment.plan.served_model} names no artifact to load")
        argv = (
            *(str(python), "-m", "engine_agent.engines.vllm.serve"),
            *("--node-id", context.node_id),
            *("--cell", assignment.cell),
            *("--generation", str(assignment.generation)),
            *("--rank", str(assignment.rank)),
            *("--role", assignment.role.value),
            *("--host", context.host),
            *("--port", str(context.port_base + ENGINE)),
            *("--admin-port", str(context.port_base + ENGINE_ADMIN)),
            *("--leader", leader_endpoint(assignment, context)),
            *("--followers", str(follower_count(assignment))),
            *("--join-timeout-s", f"{assignment.plan.ready_timeout_s:g}"),
            *("--served-model", assignment.plan.served_model),
            *("--model-dir", str(_local_folder(artifact))),
            *("--digest", artifact.digest),
            *_draft(assignment.plan.draft),
            "--",
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
        """See `EngineAdapter.health_url`; a follower has no API and answers on its administration port."""
        if assignment.role is MemberRole.LEADER:
            return f"http://{context.host}:{context.port_base + ENGINE}/health"
        return f"http://{LOOPBACK}:{context.port_base + ENGINE_ADMIN}/health"


def _draft(draft: Artifact | None) -> tuple[str, ...]:
    return () if draft is None else ("--draft", str(_local_folder(draft)), draft.digest)


def _local_folder(artifact: Artifact) -> Path:
    parts = urlsplit(artifact.uri)
    if parts.scheme != "file" or parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise EngineUnavailable(f"artifact {artifact.uri} is not on this node; vllm loads file:///absolute/path")
    return Path(unquote(parts.path))
