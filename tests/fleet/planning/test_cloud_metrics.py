"""Figures for an alarm outside: all in one call, and within what CloudWatch takes."""

import botocore.session
import pytest
from botocore.validate import ParamValidator

from fleet.planning.cloud_metrics import PASS_COUNTS_S, InstallFigures, metrics_request

STANDING = InstallFigures(cells_wanted=4, cells_ready=3, incidents_open=1, reconciled_s=0.8, last_pass_s=2.5)


def values(figures: InstallFigures) -> dict[str, float]:
    return {one["MetricName"]: one["Value"] for one in metrics_request("sw-0123456789ab", figures)["MetricData"]}


def test_all_figures_are_one_request_that_cloudwatch_takes() -> None:
    shape = botocore.session.get_session().get_service_model("cloudwatch").operation_model("PutMetricData").input_shape
    assert not ParamValidator().validate(metrics_request("sw-0123456789ab", STANDING), shape).has_errors()
    assert values(STANDING) == {
        "CompletedPasses": 1.0, "CellsWanted": 4.0, "CellsReady": 3.0, "OpenIncidents": 1.0, "LastPassAge": 2.5,
    }  # fmt: skip


@pytest.mark.parametrize(("age_s", "passes"), [(None, 0.0), (0.0, 1.0), (PASS_COUNTS_S, 1.0), (60.1, 0.0)])
def test_a_pass_counts_for_as_long_as_the_alarms_period(age_s: float | None, passes: float) -> None:
    figures = InstallFigures(0, 0, 0, reconciled_s=age_s, last_pass_s=age_s)
    assert values(figures)["CompletedPasses"] == passes
    assert ("LastPassAge" in values(figures)) is (age_s is not None)
