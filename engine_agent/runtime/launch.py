"""How to start the cell proxy of an assignment: a command line, as pure code. The engine's is its adapter's."""

import sys

from engine_agent.engines.base import EngineContext, Launch
from engine_agent.protocol.messages import Assignment
from engine_agent.protocol.ports import AGENT_CHECK, ENGINE, PROXY, PROXY_ADMIN

LOOPBACK = "127.0.0.1"


def proxy_launch(assignment: Assignment, context: EngineContext) -> Launch:
    """Command line and environment of the cell proxy beside a leader."""
    base = context.port_base
    argv = (
        *(sys.executable, "-m", "engine_agent.proxy"),
        *("--node-id", context.node_id),
        *("--cell", assignment.cell),
        *("--generation", str(assignment.generation)),
        *("--host", context.host),
        *("--port", str(base + PROXY)),
        *("--agent-check-port", str(base + AGENT_CHECK)),
        *("--admin-port", str(base + PROXY_ADMIN)),
        *("--engine", f"http://{context.host}:{base + ENGINE}"),
        *("--model", assignment.plan.served_model),
        *("--max-concurrency", str(assignment.plan.max_concurrency)),
        *("--probe-prompt", assignment.plan.probe_prompt),
    )
    return Launch(argv=argv, env={"PYTHONPATH": str(context.repo_root)})


def proxy_admin_url(context: EngineContext, path: str) -> str:
    """URL of the proxy's administration; it listens on loopback whatever the node's address is."""
    return f"http://{LOOPBACK}:{context.port_base + PROXY_ADMIN}{path}"
