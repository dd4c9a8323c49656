"""llama.cpp for the agent: the launcher's command line in the engine's Python. Features that it lacks are refused by
name: cells of several nodes, adapters, draft models."""

import msgspec

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
from engine_agent.protocol.engine_options import CACHE_PROMPT_OPTION, SLEEP_OPTION
from engine_agent.protocol.messages import Assignment, EnginePlan
from engine_agent.protocol.ports import ENGINE

INSTALL = "run python -m engine_agent.engines.llama_cpp.environment install"
UNBOUNDED = ("grammar", "grammar_lazy", "json_schema", "n_cmpl")
"""Members that the limits on work do not know."""
IGNORED = ("structured_outputs",)
SCHEMA_PATHS = ("/v1/chat/completions",)
"""On other paths it would answer without the schema."""


class LlamaCppAdapter:
    """Runs `python -m engine_agent.engines.llama_cpp.serve` in the Python that has llama.cpp."""

    name = "llama-cpp"

    def launch(self, assignment: Assignment, context: EngineContext) -> Launch:
        """See `EngineAdapter.launch`; the plan's `args` are the options in `LLAMA_CPP` of
        `engine_agent.protocol.engine_options`."""
        plan = assignment.plan
        python = engine_python(context, self.name, "llama.cpp", INSTALL)
        artifact = plain_artifact(assignment, self.name)
        argv = (
            *(str(python), "-m", "engine_agent.engines.llama_cpp.serve"),
            *("--node-id", context.node_id),
            *("--model-dir", str(local_folder(artifact, context.cache))),
            *("--digest", artifact.digest),
            *("--served-model", plan.served_model),
            *("--port", str(context.port_base + ENGINE)),
            *("--", *plan.args),
        )
        launch = Launch(argv, member_environment(assignment, context), reads=read_in_place(plan))
        return after_fetching(launch, assignment, context)

    def health_url(self, assignment: Assignment, context: EngineContext) -> str:
        """See `EngineAdapter.health_url`: 503 while the model is loaded."""
        return member_health_url(assignment, context)

    def proxy_options(self, plan: EnginePlan) -> tuple[str, ...]:
        """See `TunesProxy.proxy_options`. By these members a client could choose a slot, find other tenants' prompts in
        the cache, or leave out the usage. Of several sequences llama.cpp reports the usage of the first. Schemas that
        it would ignore are refused."""
        fixed = {"cache_prompt": CACHE_PROMPT_OPTION in plan.args, "id_slot": -1, "lora": [], "response_fields": []}
        refused = (*UNBOUNDED, *IGNORED)
        stated = {"fixed": fixed, "refused": refused, "schema_paths": SCHEMA_PATHS, "sequences": 1}
        members = msgspec.json.encode(stated).decode()
        return (*(("--sleeps",) if SLEEP_OPTION in plan.args else ()), "--engine-members", members)
