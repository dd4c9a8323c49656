"""The planner's child process: reads a view of the fleet from standard input and writes the plan of the day
(MessagePack). It is a separate process because the solver may take a minute and much memory, and so can be limited and
killed."""

import resource
import sys

import msgspec

from fleet.capacity.planning.view import CapacityView

MEMORY_MOST = 4 * 2**30
"""Bytes of address space, of which libraries reserve far more than they use."""
SECONDS_MOST = 60


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_MOST, MEMORY_MOST))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS_MOST, SECONDS_MOST))
    view = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=CapacityView)
    from fleet.capacity.planning.planner import plan_capacity

    sys.stdout.buffer.write(msgspec.msgpack.encode(plan_capacity(view)))


if __name__ == "__main__":
    main()
