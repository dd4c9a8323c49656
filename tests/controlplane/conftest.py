from collections.abc import Iterator

import pytest

from controlplane.forecast_budget import FORECASTS


@pytest.fixture(autouse=True)
def _forecasts_of_this_test_only() -> Iterator[None]:
    """Tests ask for more of them in a minute than people do."""
    FORECASTS._spent.clear()
    yield
    FORECASTS._spent.clear()
