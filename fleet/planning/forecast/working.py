"""One job of the planner's child: its ledger and its model where they are due, and the forecast. Pure."""

import zlib

import numpy as np

from fleet.planning.forecast.boosted import fit
from fleet.planning.forecast.forecaster import Made, forecast_series
from fleet.planning.forecast.job import ForecastDone, ForecastJob
from fleet.planning.forecast.ledger import calibrate
from fleet.planning.forecast.past import Past, past_of
from fleet.planning.forecast.records import SCORES_LEAST, Calibration

_WITHOUT_LIGHTGBM = (ImportError, OSError, ValueError)
"""It is not there, its libgomp is not, or a stored model is none."""


def work(job: ForecastJob, *, may_learn: bool) -> ForecastDone:
    """`may_learn`: there is time for what is due. Without LightGBM there is a forecast, too, and what is wrong."""
    past = past_of(job.key, job.made_at, np.frombuffer(job.slots, dtype=np.float64))
    ledger, model, problem = None, None, ""
    if job.records is not None and may_learn:
        ledger = calibrate(past, job.records, job.ledger)
    in_force = ledger or job.ledger
    try:
        if job.learn and may_learn:
            model = _learned(past)
        made = forecast_series(past, in_force, _text(model or job.model))
    except _WITHOUT_LIGHTGBM as error:
        made, problem = forecast_series(past, in_force, None), f"LightGBM has no say: {error}"[:300]
    return _done(job, made, ledger, model, _is_judged(made, in_force), problem)


def _learned(past: Past) -> bytes | None:
    text = fit(past)
    return None if text is None else zlib.compress(text.encode())


def _text(model: bytes) -> str | None:
    try:
        return zlib.decompress(model).decode() if model else None
    except (zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"a stored model cannot be read: {error}") from error


def _is_judged(made: Made | None, ledger: Calibration) -> bool:
    """By the errors of the next quarter of an hour, which are known first."""
    scores = ledger.scores.get(made.forecast.method[0], ()) if made else ()
    return bool(scores) and scores[0].count >= SCORES_LEAST


def _done(
    job: ForecastJob, made: Made | None, ledger: Calibration | None, model: bytes | None, is_judged: bool, problem: str
) -> ForecastDone:
    if made is None:
        return ForecastDone(job.number, ledger=ledger, model=model, problem=problem)
    return ForecastDone(
        job.number,
        p50=made.forecast.p50,
        p90=made.forecast.p90,
        p99=made.p99,
        methods=made.forecast.method,
        record=made.record,
        ledger=ledger,
        model=model,
        is_judged=is_judged,
        problem=problem,
    )
