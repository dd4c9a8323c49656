"""`python -m engine_agent node|ingress|stop-node …`: picks which agent this process is. It decides nothing else.

Only the chosen agent is imported, so that a broken dependency of one cannot stop the other.
"""

import argparse
import sys


def main(argv: list[str]) -> int:
    """Run the agent that `argv` names with the arguments after it; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m engine_agent", description=__doc__.splitlines()[0])
    parser.add_argument("agent", choices=["node", "ingress", "stop-node"], help="what to run; each has its own --help")
    chosen = parser.parse_args(argv[:1]).agent
    if chosen == "ingress":
        from engine_agent.ingress import main as ingress

        return ingress.run(argv[1:])
    if chosen == "stop-node":
        from engine_agent.runtime import stop

        return stop.run(argv[1:])
    from engine_agent.runtime import main as node

    return node.run(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
