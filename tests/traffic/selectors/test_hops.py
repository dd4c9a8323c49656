"""The fleet's hop secrets follow its SECRET_KEY, and an ingress can carry them out."""

from pytest_django import Settings

from engine_agent.ingress.hops import hop_entries
from traffic.selectors.hops import hop_secrets


def test_the_secret_of_the_key_before_is_still_believed(settings: Settings) -> None:
    settings.SECRET_KEY, settings.SECRET_KEY_FALLBACKS = "one", []
    (before,) = hop_secrets()
    settings.SECRET_KEY, settings.SECRET_KEY_FALLBACKS = "two", ["one", "older"]
    now, also = hop_secrets()
    assert (also, now != before) == (before, True)
    assert len(hop_entries((now, also))) == 2
