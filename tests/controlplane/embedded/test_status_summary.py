from pathlib import Path

import pytest

from controlplane.embedded.status import final_block

INGRESSES = {"us-east-1": "http://127.0.0.1:8080", "eu-1": "http://127.0.0.1:8081"}


def _block(*, took_s: float | None = 83.4, foreground: bool = True) -> str:
    return final_block(
        port=8000,
        token=Path("/h/operator-token"),
        password="p4ss",
        ingresses=INGRESSES,
        took_s=took_s,
        foreground=foreground,
    )


@pytest.mark.parametrize(
    "line",
    [
        "Switchyard is up: every cell is ready after 83 s.",
        "  Dashboard  http://127.0.0.1:8000/",
        "  Login      user operator, password p4ss",
        "  API        http://127.0.0.1:8000/api/v1/  (bearer token in /h/operator-token)",
        "  Ingress    us-east-1  http://127.0.0.1:8080/v1",
        "  Ingress    eu-1       http://127.0.0.1:8081/v1",
    ],
)
def test_it_says_where_everything_is(line: str) -> None:
    assert line in _block().splitlines()


def test_its_command_asks_the_first_ingress_for_a_stream() -> None:
    command = next(line for line in _block().splitlines() if "curl" in line)
    assert command.startswith("  curl -N http://127.0.0.1:8080/v1/chat/completions ")
    assert '"model": "smollm2", "stream": true' in command


@pytest.mark.parametrize(
    ("foreground", "ends"), [(True, "Ctrl-C stops everything."), (False, "`make status` shows it.")]
)
def test_it_says_how_to_stop(foreground: bool, ends: str) -> None:
    assert _block(foreground=foreground).endswith(ends)
