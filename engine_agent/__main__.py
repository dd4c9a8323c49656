"""`python -m engine_agent node|ingress|machine|…`: picks which agent this process is. It decides nothing else.

Only the chosen agent is imported, so that a broken dependency of one cannot stop the other.
"""

import argparse
import sys

OF_CHECKS = ("deep-checks", "doctor")
OF_A_MACHINE = ("machine", "join", "leave", "facts", "check")


def main(argv: list[str]) -> int:
    """Run the agent that `argv` names with the arguments after it; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m engine_agent", description=__doc__.splitlines()[0])
    choices = ["node", "ingress", "stop-node", *OF_CHECKS, *OF_A_MACHINE]
    parser.add_argument("agent", choices=choices, help="what to run; each has its own --help")
    chosen = parser.parse_args(argv[:1]).agent
    if chosen in OF_A_MACHINE:
        return _run_of_a_machine(chosen, argv[1:])
    if chosen == "deep-checks":
        from engine_agent.node.checks import deep

        return deep.main(argv[1:])
    if chosen == "doctor":
        from engine_agent.node.checks import doctor

        return doctor.main(argv[1:])
    if chosen == "ingress":
        from engine_agent.ingress import main as ingress

        return ingress.run(argv[1:])
    if chosen == "stop-node":
        from engine_agent.node import stop

        return stop.run(argv[1:])
    from engine_agent.node import main as node

    return node.run(argv[1:])


def _run_of_a_machine(chosen: str, argv: list[str]) -> int:
    if chosen == "join":
        from engine_agent.node.machine import join

        return join.run(argv)
    if chosen == "leave":
        from engine_agent.node.machine import leave

        return leave.run(argv)
    if chosen == "check":
        from engine_agent import check

        return check.run(argv)
    from engine_agent.node.machine import main as machine

    return machine.print_facts(argv) if chosen == "facts" else machine.run(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
