import pytest

from tests.engine_agent.authority import FleetOfTests


@pytest.fixture(scope="session")
def _authority_of_session() -> FleetOfTests:
    return FleetOfTests()


@pytest.fixture
def authority(_authority_of_session: FleetOfTests) -> FleetOfTests:
    """A fleet's authority without revoked certificates."""
    return FleetOfTests(authorities=list(_authority_of_session.authorities))
