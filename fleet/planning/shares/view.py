"""What deciding on shares of machines looks at, beside the fleet itself. Pure data."""

from dataclasses import dataclass
from datetime import datetime

from fleet.planning.shares.policy import GrantRule


@dataclass(frozen=True, slots=True)
class ClaimView:
    """What a deployment was set to have in a region: `asked` cells, of which `floor` are no surplus; None: all, as of a
    number that a person set. `granted`: how many of them it may have while machines are short, since when and by which
    rule; None: all."""

    asked: int
    floor: int | None = None
    granted: int | None = None
    granted_at: datetime | None = None
    rule: GrantRule | None = None
    reason: str = ""

    @property
    def in_force(self) -> int:
        """Cells that there should be."""
        return self.asked if self.granted is None else min(self.asked, self.granted)

    @property
    def least(self) -> int:
        """Cells that are no surplus."""
        return self.asked if self.floor is None else min(self.floor, self.asked)


@dataclass(frozen=True, slots=True)
class QuotaView:
    """Machines of an instance type that a team is entitled to, over all regions. `borrow_most`: how many of other teams
    it may borrow; None: any number."""

    team: str
    instance_type: str
    machines: int
    borrow_most: int | None = None


@dataclass(frozen=True, slots=True)
class ShareSettings:
    """`patience_s`: how long a cell waits for machines before others make room for it; where machines are bought, and
    come after a while, so much longer than they take to boot. `kept_s`: how long a cell that was taken is not given
    back: a start and a drain take minutes, and load that comes back within them would only move cells to and fro."""

    patience_s: float = 30.0
    kept_s: float = 600.0
