"""Samples of requests that failed without a cell: which lines, without text of clients, and fair shares of a window."""

from collections import Counter
from typing import Any

import msgspec
import pytest

from engine_agent.ingress.request_samples import FailedLine, RefusedSampler, is_sampled, route_of
from engine_agent.protocol.request_messages import (
    MAX_WINDOW_SAMPLES,
    REFUSALS_WITH_KEY,
    REFUSALS_WITHOUT_KEY,
    WINDOW_S,
    RequestSample,
    SampleKind,
)

NOW = 1_795_000_000.0
LINE = FailedLine(
    status=401, hop="-", pool="-", deployment="-", key="-", serving_class="-", cell="-", error="invalid_api_key",
    handed_back=-1, is_sender=-1, ended="LR", at=NOW, request_id="r-1", tenant="-", path="/v1/completions",
    total_ms=2.0,
)  # fmt: skip


def line(**change: Any) -> FailedLine:
    return msgspec.structs.replace(LINE, **change)


def samples_of(*lines: FailedLine) -> tuple[RequestSample, ...]:
    now = [NOW]
    sampler = RefusedSampler("i-1", lambda: now[0])
    sampler.note(b"\n".join(map(msgspec.json.encode, lines)) + b"\n")
    assert sampler.take() == ()
    now[0] += WINDOW_S
    windows = sampler.take()
    assert sampler.take() == ()
    return tuple(sample for window in windows for sample in window.samples)


def test_a_sample_has_the_code_and_the_deployment() -> None:
    lost = line(status=503, key="0a1b2c3d", tenant="acme", pool="pool.sim", error="no_ready_cell", request_id="r-2")
    first, second = samples_of(line(), lost)
    assert first == RequestSample(
        "r-2", NOW, SampleKind.ERROR, 503, 2.0, key="0a1b2c3d", path="/v1/completions", ingress="i-1",
        reason="no_ready_cell", deployment="sim",
    )  # fmt: skip
    assert (second.kind, second.status, second.key, second.reason) == (SampleKind.REFUSED, 401, "", "invalid_api_key")


@pytest.mark.parametrize(
    "change",
    [
        {"status": 200},
        {"cell": "c-1"},
        {"hop": "west"},
        {"is_sender": 1},
        {"ended": "CR"},
        {"path": "/healthz"},
        {"request_id": "-"},
    ],
    ids=str,
)
def test_other_lines_are_not_sampled(change: dict[str, Any]) -> None:
    assert samples_of(line(**change)) == ()


def test_a_request_that_every_cell_handed_back_is_sampled() -> None:
    assert is_sampled(line(status=503, cell="c-1", handed_back=1))


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/v1/completions", "/v1/completions"),
        ("/v1/responses/resp_1a2b", "/v1/responses/{id}"),
        ("/v1/sw_0a1b2c3d4e5f60_secret", ""),
        ("/v1/responses/sw_secret/more/still", ""),
        ("-", ""),
    ],
)
def test_a_path_is_a_known_route_or_nothing(path: str, route: str) -> None:
    assert route_of(path) == route


def test_floods_do_not_hide_other_errors() -> None:
    flood = [line(request_id=f"f-{n}") for n in range(2000)]
    loud = [line(status=429, key=f"{n:08x}", tenant="loud", request_id=f"l-{n}") for n in range(2000)]
    quiet = [line(status=503, key="0a1b2c3d", tenant="quiet", request_id=f"q-{n}") for n in range(3)]
    keyless = [line(status=503, error="no_ready_cell", request_id="k-1")]
    found = samples_of(*flood, *loud, *quiet, *keyless, *flood, *loud)
    assert Counter(each.request[0] for each in found) == {
        "l": REFUSALS_WITH_KEY - 3, "q": 3, "f": REFUSALS_WITHOUT_KEY - 1, "k": 1,
    }  # fmt: skip
    assert len(found) <= MAX_WINDOW_SAMPLES


def test_a_line_that_is_no_json_harms_no_other() -> None:
    sampler = RefusedSampler("i-1", lambda: NOW)
    sampler.note(b'{"status":401,\n{"status":5\n')
    assert sampler.take() == ()
