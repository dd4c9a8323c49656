"""Certificates that ingresses show to applications, those that end first."""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from fleet.models import ApplicationCertificate
from fleet.planning.application_certificate import ENDS_NOW, ENDS_SOON, ending
from kernel.tones import Tone


class CertificateState(StrEnum):
    """How long a certificate still counts, in a word."""

    GOOD = "good"
    ENDS_SOON = "ends soon"
    ENDS_NOW = "ends today"
    ENDED = "ended"


STATE_OF = {None: CertificateState.GOOD, ENDS_SOON: CertificateState.ENDS_SOON, ENDS_NOW: CertificateState.ENDS_NOW}
TONE_OF = {
    CertificateState.GOOD: Tone.OK,
    CertificateState.ENDS_SOON: Tone.WARN,
    CertificateState.ENDS_NOW: Tone.BAD,
    CertificateState.ENDED: Tone.BAD,
}


@dataclass(frozen=True, slots=True)
class CertificateRow:
    certificate: ApplicationCertificate
    state: CertificateState

    @property
    def tone(self) -> Tone:
        return TONE_OF[self.state]


def certificate_rows(*, now: datetime) -> tuple[CertificateRow, ...]:
    """Every certificate; there are some dozens at most."""
    rows = ApplicationCertificate.objects.defer("chain", "sealed_secret").order_by("not_after", "name")
    return tuple(CertificateRow(row, _state(row.not_after, now)) for row in rows)


def _state(not_after: datetime, now: datetime) -> CertificateState:
    return CertificateState.ENDED if not_after <= now else STATE_OF[ending(not_after, now)]
