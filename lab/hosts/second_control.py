"""The second host of the laboratory's control plane: it joins by the commands that operators run, word for word."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lab.hosts import client
from lab.hosts.places import CHECKOUT, Places
from lab.hosts.topology import Host, NoLaboratory

BUNDLE = "/var/tmp/control-2.bundle"  # noqa: S108 - each host of the laboratory has its own


@dataclass(frozen=True, slots=True)
class SecondControl:
    """`exports`: what a control host's launcher gets, as lines of a shell; `start`: what it runs at each boot. `say`:
    where progress goes, a line each."""

    places: Places
    first: Host
    second: Host
    python: Path
    exports: Callable[[Host], str]
    start: str
    say: Callable[[str], None]

    def join(self) -> None:
        """Invite it, have it join, and start it as it will start by itself from then on.

        Raises:
            NoLaboratory: one of these failed, and what it said.
        """
        began = time.monotonic()
        here, there = (self.places.files_of(host.name) / BUNDLE.strip("/") for host in (self.first, self.second))
        here.unlink(missing_ok=True)  # of a try before
        self.run(self.first, f"invite --address {self.second.address} {BUNDLE}")
        there.touch(mode=0o600)
        there.write_bytes(here.read_bytes())
        self.run(self.second, f"join {BUNDLE}")
        for bundle in (here, there):
            bundle.unlink()
        begin = f"setsid {self.start} >>/var/log/boot.log 2>&1 </dev/null &"
        client.captured(self.places, self.second.name, ["sh", "-c", begin])
        self.say(f"{self.second.name} joined the control plane after {time.monotonic() - began:.1f} s")

    def run(self, host: Host, command: str) -> None:
        """A command of the launcher on a control host.

        Raises:
            NoLaboratory: it refused, and why.
        """
        lines = f"{self.exports(host)}\ncd '{CHECKOUT}' && exec '{self.python}' -m controlplane.embedded {command}"
        done = client.captured(self.places, host.name, ["sh", "-c", lines])
        if done.returncode != 0:
            raise NoLaboratory(f"{host.name}: {command}: {(done.stderr or done.stdout).strip()[-500:]}")
