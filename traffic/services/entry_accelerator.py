"""Sets the dials of Global Accelerator to the weights that Route 53 has.

Global Accelerator knows no revision and no token: the last writer wins. So a dial is read, compared and set under our
lease, and a tag that is written before says from what to what which revision sets it. A dial that is neither was
somebody else's doing, and is left alone. Dials go up before others go down: clients always have somewhere to go.
"""

import logging
from dataclasses import dataclass
from datetime import datetime, timedelta

from fleet.providers.aws.calls import CallFailed
from fleet.providers.aws.calls import call as aws_call
from fleet.services.incident import incident_open, incidents_close
from kernel.events import event_record
from kernel.leases import lease_release, lease_take, this_holder
from kernel.tones import Tone
from traffic.models import Entry, EntryRevision
from traffic.planning.entry import dials_of
from traffic.selectors.entry import entry_stated, standing_revision
from traffic.services.entry_route53 import FOREIGN, AwsCall

SERVICE, HOME = "globalaccelerator", "us-west-2"
"""Its API is in this region alone."""
TAG = "switchyard:entry"
LEASE = "entry-dials"
PASS_LIMIT_S = 120.0
LOOK_EVERY_S = 60.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Dial:
    """`now`, `wanted`: in per cent. `tagged`: what it may be as its tag says; empty: it has no tag."""

    region: str
    arn: str
    now: int
    wanted: int
    tagged: tuple[str, ...]

    @property
    def is_ours(self) -> bool:
        return not self.tagged or str(self.now) in self.tagged


class EntryDials:
    """Passes of one process. They look again when there is another revision, and once a minute."""

    def __init__(self) -> None:
        self._looked: tuple[str, int, datetime] | None = None

    def follow(self, *, now: datetime, call: AwsCall = aws_call) -> None:
        """One pass."""
        stated = entry_stated()
        if stated is None or not stated.accelerators:
            return
        entry = Entry.objects.filter(name=stated.name).first()
        stands = standing_revision(entry) if entry is not None else None
        if stands is None or self._is_done(stands, now):
            return
        holder = this_holder()
        if lease_take(name=LEASE, holder=holder, ttl_s=PASS_LIMIT_S, now=now) is None:
            return
        try:
            _follow(stands, stated.accelerators, call, now)
            self._looked = (stands.entry_id, stands.revision, now)
        except CallFailed as error:
            log.warning("dials are left as they are: %s", error)
        finally:
            lease_release(name=LEASE, holder=holder, now=now)

    def _is_done(self, stands: EntryRevision, now: datetime) -> bool:
        if self._looked is None or self._looked[:2] != (stands.entry_id, stands.revision):
            return False
        return now - self._looked[2] < timedelta(seconds=LOOK_EVERY_S)


def _follow(stands: EntryRevision, groups: dict[str, str], call: AwsCall, now: datetime) -> None:
    known = {region: weight for region, weight in stands.weights.items() if region in groups}
    if not any(known.values()):
        log.warning("no endpoint group belongs to a region that gets clients: dials are left as they are")
        return
    wanted = dials_of(known)
    dials = [_read(region, groups[region], dial, call) for region, dial in sorted(wanted.items())]
    for dial in dials:
        _note(dial, now)
    if not all(dial.is_ours for dial in dials):
        return
    for dial in sorted(dials, key=lambda each: each.now - each.wanted):  # upwards first
        if dial.now != dial.wanted:
            _set(dial, stands, call, now)


def _read(region: str, arn: str, wanted: int, call: AwsCall) -> _Dial:
    group = call(SERVICE, "DescribeEndpointGroup", HOME, EndpointGroupArn=arn)["EndpointGroup"]
    tags = call(SERVICE, "ListTagsForResource", HOME, ResourceArn=arn)["Tags"]
    tag = next((str(each["Value"]) for each in tags if each["Key"] == TAG), "")
    return _Dial(region, arn, round(group.get("TrafficDialPercentage", 100)), wanted, _stated(tag))


def _stated(tag: str) -> tuple[str, ...]:
    """What a tag such as `7:100 30` says; a person's text is nothing that a dial could be."""
    return tuple(tag.partition(":")[2].split()) if tag else ()


def _set(dial: _Dial, stands: EntryRevision, call: AwsCall, now: datetime) -> None:
    """The tag comes first and names both, so that whatever is cut short, the dial is ours."""
    tags = [{"Key": TAG, "Value": f"{stands.revision}:{dial.now} {dial.wanted}"}]
    call(SERVICE, "TagResource", HOME, ResourceArn=dial.arn, Tags=tags)
    call(SERVICE, "UpdateEndpointGroup", HOME, EndpointGroupArn=dial.arn, TrafficDialPercentage=float(dial.wanted))
    message = f"the dial of {dial.region} goes from {dial.now} to {dial.wanted} %: revision {stands.revision}"
    event_record(kind="entry.dial", message=message, tone=Tone.MOVING, now=now, region=dial.region)


def _note(dial: _Dial, now: datetime) -> None:
    """A dial that somebody else set waits for a person."""
    if dial.is_ours:
        incidents_close(kind=FOREIGN, subject=dial.arn[-160:], resolution="it is as we set it again", now=now)
        return
    tagged = " or ".join(dial.tagged)
    summary = f"the dial of {dial.region} is {dial.now} %, and we set it to {tagged} %: set it back, or untag {TAG}"
    incident_open(
        kind=FOREIGN, subject=dial.arn[-160:], summary=summary, evidence={"arn": dial.arn}, now=now, region=dial.region
    )
