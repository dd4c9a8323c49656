import pytest

from controlplane.embedded.supervisor import deaths_in_a_row, wait_before_restart_s


@pytest.mark.parametrize(
    ("deaths", "wait_s"),
    [(1, 0.5), (2, 1.0), (3, 2.0), (4, 4.0), (5, 8.0), (6, 10.0), (7, 10.0), (10_000, 10.0)],
)
def test_the_wait_doubles_up_to_ten_seconds(deaths: int, wait_s: float) -> None:
    assert wait_before_restart_s(deaths) == wait_s


@pytest.mark.parametrize(
    ("previous", "ran_s", "deaths"),
    [(0, 0.1, 1), (1, 29.9, 2), (7, 30.0, 1), (7, 3600.0, 1)],
)
def test_a_long_run_forgives_earlier_deaths(previous: int, ran_s: float, deaths: int) -> None:
    assert deaths_in_a_row(previous, ran_s) == deaths
