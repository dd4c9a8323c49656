from traffic.planning.demand_placement import UNKNOWN_MS, latencies_ms


def test_regions_on_the_map_are_ordered_as_they_lie() -> None:
    found = latencies_ms(["us-east-1", "us-east-2", "us-west-2", "eu-central-1"], {})
    ordered = sorted(["us-east-2", "us-west-2", "eu-central-1"], key=lambda name: found["us-east-1", name])
    assert ordered == ["us-east-2", "us-west-2", "eu-central-1"]
    assert found["us-east-1", "us-east-1"] == 0.0
    assert 50 < found["us-east-1", "us-west-2"] < 70
    assert found["us-east-1", "us-west-2"] == found["us-west-2", "us-east-1"]


def test_what_was_measured_counts_in_both_directions() -> None:
    found = latencies_ms(["here", "there", "far"], {"there:here": 3.0})
    assert found["here", "there"] == found["there", "here"] == 3.0
    assert found["here", "far"] == UNKNOWN_MS
