"""What the planner hands its child, and what it gets back. Plain data, without numpy: both sides read it."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from msgspec import DecodeError, ValidationError
from msgspec.msgpack import Decoder

from fleet.planning.forecast.records import Calibration, Record
from fleet.planning.forecast.series import SeriesKey

LENGTH_BYTES = 4
"""Before each answer, in network order."""


@dataclass(frozen=True, slots=True)
class ForecastJob:
    """A series to forecast. `slots`: loads as 8-byte floats of this machine, NaN where there is a hole, the last of
    which ends at `made_at`. `records` None: its ledger is not due. `learn`: its model is; `model`: the one there is."""

    number: int
    key: SeriesKey
    made_at: datetime
    slots: bytes
    ledger: Calibration
    model: bytes = b""
    records: tuple[Record, ...] | None = None
    learn: bool = False


@dataclass(frozen=True, slots=True)
class ForecastRound:
    """`ends_after_s`: the child ends by itself then; `learns_for_s`: in this time alone it works on ledgers and models,
    so that all series are forecast."""

    jobs: tuple[ForecastJob, ...]
    learns_for_s: float
    ends_after_s: float


@dataclass(frozen=True, slots=True)
class ForecastDone:
    """What became of a job. `p50` empty: nothing is known of the series. `ledger`, `model`: where they are new.
    `is_judged`: its quantiles rest on errors that were seen. `problem`: why there is no forecast, or no LightGBM."""

    number: int
    p50: tuple[float, ...] = ()
    p90: tuple[float, ...] = ()
    p99: tuple[float, ...] = ()
    methods: tuple[str, ...] = ()
    record: Record | None = None
    ledger: Calibration | None = None
    model: bytes | None = None
    is_judged: bool = False
    problem: str = ""


def framed(answer: bytes) -> bytes:
    """An answer as the child writes it."""
    return len(answer).to_bytes(LENGTH_BYTES, "big") + answer


def read_answers(written: bytes) -> Iterator[ForecastDone]:
    """What a child has written; what it was writing when it ended, and all after something that cannot be read, is left
    out."""
    decoder, at = Decoder(ForecastDone), 0
    while (begins := at + LENGTH_BYTES) < len(written):
        at = begins + int.from_bytes(written[at:begins], "big")
        try:
            yield decoder.decode(written[begins:at])
        except (DecodeError, ValidationError):
            return
