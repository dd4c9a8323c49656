"""vLLM as the agent sees it: the launcher's command line in the engine's own Python. It starts nothing."""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from engine_agent.engines.base import (
    EngineContext,
    EngineUnavailable,
    Launch,
    member_args,
    member_environment,
    member_health_url,
)
from engine_agent.protocol.messages import Artifact, Assignment


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
            *member_args(assignment, context),
            *("--host", context.host),
            *("--join-timeout-s", f"{assignment.plan.ready_timeout_s:g}"),
            *("--served-model", assignment.plan.served_model),
            *("--model-dir", str(_local_folder(artifact))),
            *("--digest", artifact.digest),
            *_draft(assignment.plan.draft),
            "--",
            *assignment.plan.args,
        )
        drafts = () if assignment.plan.draft is None else (_local_folder(assignment.plan.draft),)
        reads = (_local_folder(artifact), *drafts)
        return Launch(argv=argv, env=member_environment(assignment, context), reads=reads)

    def health_url(self, assignment: Assignment, context: EngineContext) -> str:
        """See `EngineAdapter.health_url`."""
        return member_health_url(assignment, context)


def _draft(draft: Artifact | None) -> tuple[str, ...]:
    return () if draft is None else ("--draft", str(_local_folder(draft)), draft.digest)


def _local_folder(artifact: Artifact) -> Path:
    parts = urlsplit(artifact.uri)
    if parts.scheme != "file" or parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise EngineUnavailable(f"artifact {artifact.uri} is not on this node; vllm loads file:///absolute/path")
    return Path(unquote(parts.path))
