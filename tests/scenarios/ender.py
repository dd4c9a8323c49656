"""Ends a fleet when the test session that started it ends, however that ends: `python tests/scenarios/ender.py HOME`.

A fleet outlives whoever started it, which is its purpose. So this process waits for the end of a
pipe whose other end only the session holds, and then does what `make down` does.
"""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]


def main(home: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    if Path(home).is_dir():
        environment = {**os.environ, "SWITCHYARD_HOME": home}
        subprocess.run(
            [sys.executable, "-m", "controlplane.embedded", "down"], cwd=CHECKOUT, env=environment, check=False
        )
        shutil.rmtree(Path(home).parent, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
