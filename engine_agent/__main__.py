"""`python -m engine_agent COMMAND`: runs an agent or one of its tools.

Only the chosen module is imported, so that a broken dependency of one agent cannot stop another."""

import argparse
import importlib
import sys

COMMANDS = {
    "node": "engine_agent.node.main:run",
    "ingress": "engine_agent.ingress.main:run",
    "stop-node": "engine_agent.node.lock:stop_node",
    "deep-checks": "engine_agent.node.checks.deep:main",
    "doctor": "engine_agent.node.checks.doctor:main",
    "machine": "engine_agent.node.machine.main:run",
    "join": "engine_agent.node.machine.join:run",
    "leave": "engine_agent.node.machine.join:run_leave",
    "facts": "engine_agent.node.machine.main:print_facts",
    "check": "engine_agent.check:run",
}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m engine_agent", description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=COMMANDS, help="each has its own --help")
    module, _, function = COMMANDS[parser.parse_args(argv[:1]).command].partition(":")
    return int(getattr(importlib.import_module(module), function)(argv[1:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
