"""The fleet of a laboratory that is up already, for the scenarios that need nothing but addresses: its hosts are their
own machines, and lose their power where a process would be killed."""

from pathlib import Path

import pytest

from lab.hosts import client
from lab.hosts.fleet import CONTROL_HOME, FIRST_CONTROL
from lab.hosts.places import read_places
from lab.hosts.topology import NoLaboratory
from tests.scenarios.running_fleet import REGIONS, START_LIMIT_S, AskedFleet, eventually


class LabFleet(AskedFleet):
    """All addresses are of the laboratory's record.

    Raises:
        pytest.UsageError: no laboratory runs there, or none that scenarios can use; the text says what it lacks.
    """

    def __init__(self, home: Path) -> None:
        self._places = read_places({"SWITCHYARD_HOME": str(home)})
        try:
            self._topology = client.topology_of(self._places)
            forwards = client.forwards_of(self._places)
        except NoLaboratory as error:
            raise pytest.UsageError(f"--lab {home}: {error}") from None
        if lacking := sorted(set(REGIONS) - set(self._topology.regions)):
            raise pytest.UsageError(f"--lab {home}: scenarios need a laboratory with {' and '.join(lacking)}.")
        dashboards = [each.here for each in forwards if each.host == FIRST_CONTROL and each.by_loopback]
        if not dashboards:
            raise pytest.UsageError(f"--lab {home}: a laboratory without a fleet; `lab up` without --bare makes one.")
        self.url = f"http://127.0.0.1:{dashboards[0]}"
        self._ingresses: dict[str, str] = {}
        for each in forwards:
            if not each.by_loopback:
                region = self._topology.host(each.host).site
                self._ingresses.setdefault(region, f"http://127.0.0.1:{each.here}")
        self._token = self._places.files_of(FIRST_CONTROL) / CONTROL_HOME.strip("/") / "operator-token"
        self._off: set[str] = set()

    def ingress(self, region: str = REGIONS[0]) -> str:
        return self._ingresses[region]

    def token(self) -> str:
        return self._token.read_text().strip()

    def take_down(self, node: str) -> None:
        machines = {row["node"]: row["address"] for row in self.api("machines", page_size="500")["results"]}
        names = {str(host.address): host.name for host in self._topology.hosts.values()}
        host = names[machines[node]]
        client.ask(self._places, "power-off", name=host)
        self._off.add(host)

    def wait_until_whole(self) -> None:
        """With every host under power again, and every machine back."""
        for host in sorted(self._off):
            client.ask(self._places, "boot", name=host)
            self._off.remove(host)
        super().wait_until_whole()
        eventually(
            lambda: all(row["connected"] for row in self.api("machines", page_size="500")["results"]), START_LIMIT_S
        )
