"""Prints at the end of a test run how much of the small model was explored."""

from collections.abc import Callable

import pytest

_told = pytest.StashKey[list[str]]()


@pytest.fixture
def tell(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Adds a line to the end of the run."""
    return request.config.stash.setdefault(_told, []).append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in config.stash.get(_told, []):
        terminalreporter.write_line(line)
