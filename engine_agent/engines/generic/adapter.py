"""A third-party program for the agent: the launcher's command line and the health URL. Features that such programs lack
are refused by name: cells of several nodes, adapters, draft models."""

import sys
from collections.abc import Sequence
from itertools import pairwise

from engine_agent.engines.base import (
    LOOPBACK,
    EngineContext,
    EngineUnavailable,
    Launch,
    after_fetching,
    local_folder,
    member_environment,
    plain_artifact,
    read_in_place,
)
from engine_agent.engines.generic.environment import FOLDER, HEALTH_PATH, PREFIX, PROGRAM
from engine_agent.protocol.messages import Assignment
from engine_agent.protocol.ports import ENGINE

COMMAND = "--command"


class GenericAdapter:
    """Runs `python -m engine_agent.engines.generic.serve`, which becomes the program that the plan names."""

    name = "generic"

    def launch(self, assignment: Assignment, context: EngineContext) -> Launch:
        """See `EngineAdapter.launch`; the plan's `args` are `--command NAME` and the program's options."""
        plan = assignment.plan
        artifact = plain_artifact(assignment, self.name)
        command, options = split_command(plan.args)
        program = context.engine_pythons.get(PREFIX + command)
        if program is None:
            known = ", ".join(sorted(name.removeprefix(PREFIX) for name in context.engine_pythons if PREFIX in name))
            raise EngineUnavailable(
                f"this node has no program {command!r}; it has {known or 'none'}: put one at "
                f"{FOLDER}/{command}/{PROGRAM} in its cache"
            )
        argv = (
            *(sys.executable, "-m", "engine_agent.engines.generic.serve"),
            *("--node-id", context.node_id),
            *("--program", str(program)),
            *("--model-dir", str(local_folder(artifact, context.cache))),
            *("--digest", artifact.digest),
            *("--alias", plan.served_model),
            *("--port", str(context.port_base + ENGINE)),
            *("--", *options),
        )
        launch = Launch(
            argv=argv,
            env=member_environment(assignment, context),
            reads=(program.parent, *read_in_place(plan)),
            programs=(program,),
        )
        return after_fetching(launch, assignment, context)

    def health_url(self, assignment: Assignment, context: EngineContext) -> str:
        """See `EngineAdapter.health_url`: the list of models, which every such server has."""
        return f"http://{LOOPBACK}:{context.port_base + ENGINE}{HEALTH_PATH}"


def split_command(args: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Returns the program that a plan's arguments name, and the program's own arguments. Raises EngineUnavailable if
    they name none."""
    for place, (flag, value) in enumerate(pairwise(args)):
        if flag == COMMAND:
            return value, (*args[:place], *args[place + 2 :])
    raise EngineUnavailable(f"the plan names no program: engine generic needs {COMMAND}")
