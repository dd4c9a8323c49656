"""Errors of load forecasts by method and horizon over recorded weeks.

Each origin sees only earlier values, and the ledger learns as it does live.

    .venv/bin/python -m bench forecast m_large m_mid m_small
"""

import argparse
import csv
import lzma
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

import numpy as np

from bench.traffic.arrivals import TRACES
from fleet.capacity.planning.forecast import Floats, Made, calibrate, forecast_series, past_of
from fleet.capacity.planning.forecast_series import (
    HISTORY_SLOT_S,
    LEADS,
    SLOT_S,
    Calibration,
    Method,
    Record,
    SeriesKey,
)
from simulator.clock import EPOCH

LEDGER = "ledger's choice"
SHOWN = (0, 1, 3, 7, 15, 95)
"""Slots ahead whose figures are printed."""
DAY_SLOTS = 86_400 // HISTORY_SLOT_S
RECORD_SLOTS = 1_800 // HISTORY_SLOT_S
KEPT_SLOTS = 9 * DAY_SLOTS


@dataclass(frozen=True, slots=True)
class Run:
    """Of a series: forecasts from `judged_from` on are scored. Seconds are of the processor."""

    name: str
    made: list[Made]
    forecast_s: float


def series(column: str) -> Floats:
    """A recorded load in slots of five minutes; what was recorded in longer ones is repeated."""
    name, repeat = ("azure_2024_week.csv.xz", 3) if column.startswith("azure") else ("servegen_rates.csv.xz", 2)
    with lzma.open(TRACES / name, "rt", newline="") as lines:
        rates = [float(row[column]) for row in csv.DictReader(lines)]
    return np.repeat(np.array(rates), repeat)


def run(column: str, hole_share: float, seed: int) -> Run:
    """Forecast each half hour, the ledger and its records as the planner keeps them."""
    slots = _with_holes(series(column), hole_share, seed)
    key = SeriesKey(column, "anywhere", "realtime")
    calibration, made, records, forecast_s = Calibration(), list[Made](), list[Record](), 0.0
    for end in range(RECORD_SLOTS, len(slots) + 1, RECORD_SLOTS):
        past = past_of(key, EPOCH + timedelta(seconds=end * HISTORY_SLOT_S), slots[max(0, end - KEPT_SLOTS) : end])
        began = time.process_time()
        if end % (2 * RECORD_SLOTS) == 0:
            calibration = calibrate(past, records, calibration)
        one = forecast_series(past, calibration)
        forecast_s += time.process_time() - began
        if one is not None:
            made.append(one)
            records.append(one.record)
    return Run(column, made, forecast_s)


def _with_holes(slots: Floats, share: float, seed: int) -> Floats:
    holes = np.repeat(np.random.default_rng(seed).random(len(slots) // 12 + 1) < share, 12)[: len(slots)]
    return np.where(holes, np.nan, slots)


def scores(of: Run, judged_from: datetime) -> Iterator[tuple[int, str, float, float, int]]:
    """Lead, method, WAPE and coverage of the p90 in %, origins: of origins of which all methods had a forecast."""
    whole = series(of.name)
    truth = past_of(SeriesKey(of.name, "", ""), EPOCH + timedelta(seconds=len(whole) * HISTORY_SLOT_S), whole)
    methods = [method.value for method in Method]
    judged = [
        one
        for one in of.made
        if one.record.made_at >= judged_from and all(method in one.record.p50 for method in methods)
    ]
    for lead in SHOWN:
        horizon, ahead = LEADS.index(lead), timedelta(seconds=lead * SLOT_S)
        actual = np.array([truth.block_from(one.record.made_at + ahead) for one in judged])
        over = ~np.isnan(actual)
        for method in (*methods, LEDGER):
            p50 = np.array([_issued(one, method, horizon, lead)[0] for one in judged])[over]
            p90 = np.array([_issued(one, method, horizon, lead)[1] for one in judged])[over]
            off = float(np.abs(p50 - actual[over]).sum() / actual[over].sum())
            yield lead, method, 100 * off, 100 * float(np.mean(actual[over] <= p90)), int(over.sum())


def _issued(one: Made, method: str, horizon: int, lead: int) -> tuple[float, float]:
    if method == LEDGER:
        return one.forecast.p50[lead], one.forecast.p90[lead]
    return one.record.p50[method][horizon], one.record.p90[method][horizon]


def report(of: Run, from_day: float) -> None:
    """A table: methods by horizon, WAPE % and, in brackets, how often the p90 held."""
    rows = list(scores(of, EPOCH + timedelta(days=from_day)))
    origins = rows[0][-1] if rows else 0
    print(f"\n{of.name}, {origins} origins from day {from_day:g}")
    print("| method | " + " | ".join(f"{(lead + 1) * SLOT_S / 3600:g} h" for lead in SHOWN) + " |")
    print("| --- |" + " --- |" * len(SHOWN))
    for method in [*(method.value for method in Method), LEDGER]:
        cells = [f"{off:.1f} ({held:.0f})" for _, name, off, held, _ in rows if name == method]
        print(f"| {method} | " + " | ".join(cells) + " |")
    for lead in SHOWN:
        by_method = {name: off for at, name, off, _, _ in rows if at == lead}
        own = by_method.pop(LEDGER)
        best = min(by_method, key=lambda name: by_method[name])
        print(f"  {(lead + 1) * SLOT_S / 3600:g} h: {100 * (own / by_method[best] - 1):+.1f} % beside {best}")
    print(f"  {1000 * of.forecast_s / max(1, len(of.made)):.1f} ms a forecast with its ledger (processor)")


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("series", nargs="*", default=["m_large", "m_mid", "m_small"])
    parser.add_argument("--from-day", type=float, default=6.0, help="score forecasts from this day of the record on")
    parser.add_argument("--holes", type=float, default=0.0, help="share of the hours of which nothing is known")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    for column in asked.series:
        report(run(column, asked.holes, asked.seed), asked.from_day)
