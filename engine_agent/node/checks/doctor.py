"""`python -m engine_agent doctor`: what is wrong with this node, and what would be right, before an engine starts here.

It reads, starts no program and changes nothing. `--json` prints a line for each check, as `deep-checks` does. Exit
status: 1 if anything is wrong.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from engine_agent.engines.registry import engine_pythons
from engine_agent.node.checks.diagnosis import Expected, diagnose, engine_for
from engine_agent.node.checks.node_facts import read_node
from engine_agent.node.checks.result import Result
from engine_agent.node.telemetry.fingerprint import AGENT_ROOT
from engine_agent.protocol.neuron_targets import TARGET_BY_NAME

ENGINES = ("generic", "neuron", "sim", "vllm")
MARKS = {True: "ok", False: "WRONG", None: "-"}


def main(argv: list[str]) -> int:
    options = _arguments(argv)
    cache = (options.cache or Path(os.environ.get("SWITCHYARD_CACHE") or AGENT_ROOT / ".cache")).absolute()
    facts = read_node(
        root=options.root,
        pythons=engine_pythons(cache),
        folders=(cache, *([options.state] if options.state else [])),
        host=options.host,
        port_base=options.port_base,
    )
    engine = options.engine or engine_for(facts)
    results = list(diagnose(facts, Expected(engine, options.target, options.nodes, options.devices)))
    if options.json:
        sys.stdout.writelines(result.as_line() + "\n" for result in results)
    else:
        sys.stdout.write(as_text(engine, results))
    return int(any(result.ok is False for result in results))


def as_text(engine: str, results: Sequence[Result]) -> str:
    """For a person: one line for each check, and below a wrong one what would be right."""
    width = max(len(result.check) for result in results)
    lines = [f"a node for engine {engine}:"]
    for result in results:
        lines.append(f"  {MARKS[result.ok]:<5} {result.check:<{width}}  {result.found}")
        if result.ok is False:
            lines.append(f"  {'':<5} {'':<{width}}  wanted: {result.wanted}")
    wrong = sum(result.ok is False for result in results)
    lines.append("nothing is wrong" if not wrong else f"{wrong} of {len(results)} checks found something wrong")
    return "\n".join(lines) + "\n"


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m engine_agent doctor", description=__doc__)
    parser.add_argument("--engine", choices=ENGINES, help="what shall run here; else by what the node has")
    parser.add_argument(
        "--target", choices=sorted(TARGET_BY_NAME), default="", help="of engine neuron, the build that versions need"
    )
    parser.add_argument("--nodes", type=int, default=1, help="of a cell that this node will be in")
    parser.add_argument("--devices", type=int, default=0, help="how many there should be; else as the bus shows")
    parser.add_argument("--cache", type=Path, help="of engines and weights; else SWITCHYARD_CACHE")
    parser.add_argument("--state", type=Path, help="the folder of the agent's state")
    parser.add_argument("--host", default="127.0.0.1", help="the address that the node will listen on")
    parser.add_argument("--port-base", type=int, help="first of the ports that the node will have; else none is tried")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each check")
    parser.add_argument("--root", type=Path, default=Path("/"), help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
