"""The summary of rounds of the near-real-time bench."""

from bench.traffic.near_realtime import BODY, summary
from kernel.decoding import decode_json


def test_rounds_are_summed_up_with_their_ends_and_the_rate_of_two_cores() -> None:
    rows = [
        {"group_sum_us": 100.0, "per_s": speed, "jobs_us": jobs, "sum_us": jobs + 200.0, "requests_left": 0, "done": 5}
        for speed, jobs in ((40.0, 700.0), (30.0, 1700.0), (50.0, 200.0))
    ]
    lines = {line[:24].strip(): line[24:].strip() for line in summary(rows)}
    assert lines["per_s"] == "40 (30 to 50)"
    assert lines["jobs_us"] == "700 (200 to 1700)"
    assert lines["whole_us"] == "1000 (500 to 2000)"
    assert lines["per_s on 2 cores"] == "2000 (1000 to 4000)"
    assert lines["requests left"] == "0"
    assert "done" not in lines


def test_bodies_are_requests_of_any_length() -> None:
    assert decode_json(BODY % (7, b""))["model"] == "tiny"
    assert len(BODY % (7, b" ." * 4096)) > 8192
