"""Paths of a machine's installation, and the file with what it learned when it joined."""

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


class HostPaths:
    """`code` contains releases, and the link `current` to the one in use. The state is next to it or, for root, in
    /var/lib."""

    def __init__(self, code: Path) -> None:
        self.code = code
        self.state = ROOT_STATE if code == ROOT_CODE else code / "state"
        self.current = code / "current"
        self.python = self.current / "venv/bin/python"
        self.releases = code / "releases"
        self.previous = code / "previous"
        self.trial = code / "trial"
        """Exists until the current release has confirmed itself; its first line is the release to go back to."""
        self.trial_tries = code / "trial-tries"
        """One line per start on trial."""
        self.went_back = code / "went-back"
        """The former `trial` of the last release that did not confirm itself."""
        start_files = (code / "start", code / "agent.pid")
        self.of_releases = (self.previous, self.trial, self.trial_tries, self.went_back, *start_files)
        """All files next to `current` for its change."""
        self.home = self.state / "machine"
        """The machine agent's credential, certificate and journal."""
        self.runs = self.state / "runs"
        """The folder of the node or ingress that it runs."""
        self.cache = self.state / "cache"
        self.log = self.state / "machine.log"
        self.reboot_command = self.state / "reboot-command"
        """Exists if the control plane may have the host rebooted; contains the command for it."""
        self.leave_wish = self.state / "leave"
        """Exists when the owner of the host wants it to leave."""

    def joined(self) -> Joined:
        return msgspec.json.decode((self.state / "machine.json").read_bytes(), type=Joined)

    def keep(self, joined: Joined) -> None:
        write_durably(self.state / "machine.json", msgspec.json.format(msgspec.json.encode(joined), indent=1))
