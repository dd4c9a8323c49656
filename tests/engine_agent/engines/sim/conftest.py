"""One healthy single-node cell that the tests of its HTTP share."""

from collections.abc import Iterator

import pytest

from tests.engine_agent.engines.sim.cells import Member, running_cell


@pytest.fixture(scope="session")
def leader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Member]:
    """A leader without followers; a test that injects a fault must remove it."""
    with running_cell(tmp_path_factory.mktemp("cell"), 0, "--max-num-seqs", "4", "--seed", "7") as (member,):
        yield member
