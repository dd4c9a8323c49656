"""Plays units of machines against the cloud of tests for long: `python -m bench.cloud_machine [--steps 10000]`.

It is `tests/fleet/providers/aws/test_machine.py` with more and longer examples. Prints how many steps were made, what
crashed where, and what came of the attempts.
"""

import argparse
import math
import os
import subprocess
import sys
import time

STEPS_EACH = 100
MORE_EXAMPLES = 1.2
"""Some examples end early: 100 of them made 9,449 steps, not 10,000."""
LONGEST_S = 3600


def main() -> int:
    """Play, and return pytest's exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--steps", type=int, default=10_000, help="at least so many, over all examples; fewer is a failure"
    )
    asked = parser.parse_args()
    environment = {
        **os.environ,
        "CLOUD_MACHINE_EXAMPLES": str(math.ceil(asked.steps * MORE_EXAMPLES / STEPS_EACH)),
        "CLOUD_MACHINE_STEPS": str(STEPS_EACH),
        "CLOUD_MACHINE_LEAST_STEPS": str(asked.steps),
    }
    command = [sys.executable, "-m", "pytest", "tests/fleet/providers/aws/test_machine.py", "-n", "0", "-q", "-s"]
    command += ["--timeout", str(LONGEST_S)]
    began_s = time.monotonic()
    status = subprocess.run(command, env=environment, check=False).returncode
    print(f"{time.monotonic() - began_s:.0f} s, exit status {status}")
    return status


if __name__ == "__main__":
    sys.exit(main())
