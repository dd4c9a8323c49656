"""The summary of rounds of the near-real-time bench."""

from bench.traffic.near_realtime import BODY, summary
from kernel.decoding import decode_json


def test_rounds_are_summed_up_with_their_ends_and_the_rate_of_two_cores() -> None:
    same = {"group_sum_us": 100.0, "net_sim_us": 50.0, "net_stub_us": 150.0, "requests_left": 0, "done": 5}
    rows = [
        {**same, "per_s": speed, "jobs_us": jobs + 7.0, "net_jobs_us": jobs, "sum_us": jobs + 300.0}
        for speed, jobs in ((40.0, 700.0), (30.0, 1700.0), (50.0, 200.0))
    ]
    lines = {line[:24].strip(): line[24:].strip() for line in summary(rows)}
    assert lines["per_s"] == "40 (30 to 50)"
    assert lines["net_jobs_us"] == "700 (200 to 1700)"
    assert lines["whole_us"] == "1000 (500 to 2000)"
    assert lines["ours_us"] == "950 (450 to 1950)"
    assert lines["per_s on 2 cores"] == "2000 (1000 to 4000)"
    assert lines["requests left"] == "0"
    assert "done" not in lines


def test_bodies_are_requests_of_any_length() -> None:
    assert decode_json(BODY % (7, b""))["model"] == "tiny"
    assert len(BODY % (7, b" ." * 4096)) > 8192
