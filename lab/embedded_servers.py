"""One PostgreSQL and one Valkey for tests and benches: fast, not durable, gone with the process that started them."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from controlplane.embedded.processes import GUARD

ROOT = Path(__file__).resolve().parent.parent

_STOP_WITHIN_S = 60.0


class EmbeddedServers:
    """The servers of `home`, run by `python -m controlplane.embedded servers`."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._process: subprocess.Popen[str] | None = None
        self.addresses: dict[str, str] = {}

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError("the servers do not run")
        return self._process.pid

    def start(self) -> dict[str, str]:
        """Start them and wait until they answer: `database_url` and `redis_url`, as in `addresses`."""
        guard = [sys.executable, "-I", "-S", str(GUARD), "--parent", str(os.getpid())]
        guard += ["--death-signal", str(int(signal.SIGTERM)), "--"]
        self._home.parent.mkdir(parents=True, exist_ok=True)
        with (self._home.parent / "servers.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*guard, sys.executable, "-m", "controlplane.embedded", "servers", "--not-durable"],
                cwd=ROOT,
                env={**os.environ, "SWITCHYARD_HOME": str(self._home)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise RuntimeError((self._home.parent / "servers.log").read_text())
        self.addresses = json.loads(line)
        return self.addresses

    def stop(self) -> None:
        if self._process is None:
            return
        with self._process as process:
            process.terminate()
            try:
                process.wait(_STOP_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()
