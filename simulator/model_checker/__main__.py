"""`python -m simulator.model_checker`: visits every state of the small model and prints their number, the violations,
and whether each state can reach an end."""

import argparse
import sys
from collections.abc import Sequence
from time import perf_counter

from simulator.model_checker.model import Model, search
from simulator.model_checker.state import FaultBudget


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m simulator.model_checker", description=__doc__)
    parser.add_argument("--cells", type=int, default=3)
    parser.add_argument("--crashes", type=int, default=1, help="engines that may crash")
    parser.add_argument("--duplicates", type=int, default=1, help="old orders that may be delivered again")
    parser.add_argument("--stalls", type=int, default=0, help="decisions that a stalled process may write late")
    parser.add_argument("--most", type=int, default=1_000_000, help="maximum number of states")
    args = parser.parse_args(arguments)
    began_s = perf_counter()
    budget = FaultBudget(crashes=args.crashes, duplicates=args.duplicates, stalls=args.stalls)
    result = search(Model(args.cells), budget, args.most)
    print(f"{result.summary(budget)}, in {perf_counter() - began_s:.1f} s")
    for violation in result.violations:
        print(f"  broken: {violation}")
    return 0 if result.is_complete and not result.violations and not result.stuck else 1


if __name__ == "__main__":
    sys.exit(main())
