"""Paths of a machine's installation, and the file with what it learned when it joined."""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from engine_agent.node.journal import write_durably
from engine_agent.protocol.machine_messages import MachineFacts

ROOT_CODE, ROOT_STATE = Path("/opt/switchyard"), Path("/var/lib/switchyard")


class Joined(msgspec.Struct, frozen=True):
    """What a machine stores when it joins. `machine`: its assigned id; "": the id of its nonce. `variables`: further
    variables of its agents, such as the endpoints of its cloud."""

    server: str
    facts: MachineFacts
    machine: str = ""
    variables: dict[str, str] = {}


@dataclass(frozen=True, slots=True)
class HostPaths:
    """`code` contains releases, and the link `current` to the one in use. The state is next to it or, for root, in
    /var/lib."""

    code: Path

    @property
    def state(self) -> Path:
        return ROOT_STATE if self.code == ROOT_CODE else self.code / "state"

    @property
    def current(self) -> Path:
        return self.code / "current"

    @property
    def releases(self) -> Path:
        return self.code / "releases"

    @property
    def previous(self) -> Path:
        return self.code / "previous"

    @property
    def trial(self) -> Path:
        """Exists until the current release has confirmed itself; its first line is the release to go back to."""
        return self.code / "trial"

    @property
    def trial_tries(self) -> Path:
        """One line per start on trial."""
        return self.code / "trial-tries"

    @property
    def went_back(self) -> Path:
        """The former `trial` of the last release that did not confirm itself."""
        return self.code / "went-back"

    @property
    def of_releases(self) -> tuple[Path, ...]:
        """All files next to `current` for its change."""
        return self.previous, self.trial, self.trial_tries, self.went_back, self.code / "start", self.code / "agent.pid"

    @property
    def python(self) -> Path:
        return self.current / "venv/bin/python"

    @property
    def home(self) -> Path:
        """The machine agent's credential, certificate and journal."""
        return self.state / "machine"

    @property
    def runs(self) -> Path:
        """The folder of the node or ingress that it runs."""
        return self.state / "runs"

    @property
    def cache(self) -> Path:
        return self.state / "cache"

    @property
    def log(self) -> Path:
        return self.state / "machine.log"

    @property
    def leave_wish(self) -> Path:
        """Exists when the owner of the host wants it to leave."""
        return self.state / "leave"

    def joined(self) -> Joined:
        return msgspec.json.decode((self.state / "machine.json").read_bytes(), type=Joined)

    def keep(self, joined: Joined) -> None:
        write_durably(self.state / "machine.json", msgspec.json.format(msgspec.json.encode(joined), indent=1))
