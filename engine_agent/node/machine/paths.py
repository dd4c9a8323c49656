"""Where a machine's agent is installed and keeps what it knows. Pure, but for the two files it reads and writes."""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from engine_agent.node.journal import write_durably
from engine_agent.protocol.machine_messages import MachineFacts

ROOT_CODE, ROOT_STATE = Path("/opt/switchyard"), Path("/var/lib/switchyard")


class Joined(msgspec.Struct, frozen=True):
    """What a machine needs to know from when it joined. `machine`: the id that it was given; "": that of its nonce.
    `variables`: of the environment that its agents are given beside their own, such as where its cloud is."""

    server: str
    facts: MachineFacts
    machine: str = ""
    variables: dict[str, str] = {}


@dataclass(frozen=True, slots=True)
class HostPaths:
    """`code` holds releases, and `current`, the one in use; the state lies beside or, of root's, in /var/lib."""

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
        """The release before the current one."""
        return self.code / "previous"

    @property
    def trial(self) -> Path:
        """Is there while the current release has not confirmed itself: in its first line what to go back to."""
        return self.code / "trial"

    @property
    def trial_tries(self) -> Path:
        """A line for each start on trial."""
        return self.code / "trial-tries"

    @property
    def went_back(self) -> Path:
        """Was `trial` of the last release that did not confirm itself."""
        return self.code / "went-back"

    @property
    def of_releases(self) -> tuple[Path, ...]:
        """All that is beside `current` for changing it."""
        return self.previous, self.trial, self.trial_tries, self.went_back, self.code / "start", self.code / "agent.pid"

    @property
    def python(self) -> Path:
        return self.current / "venv/bin/python"

    @property
    def home(self) -> Path:
        """The machine agent's own: credential, certificate, journal."""
        return self.state / "machine"

    @property
    def runs(self) -> Path:
        """A folder of each node or ingress that it runs: one, or none."""
        return self.state / "runs"

    @property
    def cache(self) -> Path:
        return self.state / "cache"

    @property
    def log(self) -> Path:
        return self.state / "machine.log"

    @property
    def leave_wish(self) -> Path:
        """Is there while whoever owns the host wants it to leave."""
        return self.state / "leave"

    def joined(self) -> Joined:
        """What was kept when it joined.

        Raises:
            OSError: it did not join.
            msgspec.DecodeError: the file is damaged.
        """
        return msgspec.json.decode((self.state / "machine.json").read_bytes(), type=Joined)

    def keep(self, joined: Joined) -> None:
        """Remember what `joined` returns.

        Raises:
            OSError: the disk refused.
        """
        write_durably(self.state / "machine.json", msgspec.json.format(msgspec.json.encode(joined), indent=1))
