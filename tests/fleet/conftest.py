"""For whatever orders machines: the clock, and a provider that launches none. Django is set up after this is read."""

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.fleet.cloud import Cloud
    from tests.fleet.provision import Clock


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> "Clock":
    """The time of every service, which stands until a test moves it."""
    from tests.fleet.provision import Clock

    made = Clock()
    monkeypatch.setattr("kernel.clock.now", made)
    return made


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> "Cloud":
    """Whatever a region names as its provider."""
    from tests.fleet.cloud import Cloud

    made = Cloud()
    monkeypatch.setattr("fleet.machines.services.provisioning.provider_named", lambda _: made)
    return made
