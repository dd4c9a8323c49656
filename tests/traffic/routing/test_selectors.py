"""Hop secrets follow SECRET_KEY, and ingresses accept them."""

import pytest
from django.utils import timezone
from pytest_django import Settings

from engine_agent.ingress.routing_maps import hop_entries
from fleet.regions.models import Region
from traffic.routing.models import Ingress, RoutingTable
from traffic.routing.selectors import hop_secrets, table_for_ingresses


def test_the_secret_of_the_key_before_is_still_believed(settings: Settings) -> None:
    settings.SECRET_KEY, settings.SECRET_KEY_FALLBACKS = "one", []
    (before,) = hop_secrets()
    settings.SECRET_KEY, settings.SECRET_KEY_FALLBACKS = "two", ["one", "older"]
    now, also = hop_secrets()
    assert (also, now != before) == (before, True)
    assert len(hop_entries((now, also))) == 2


@pytest.mark.django_db
def test_only_ingresses_of_several_regions_get_hop_secrets() -> None:
    for number, region in enumerate(("east", "west")):
        Region.objects.create(name=region)
        Ingress.objects.create(
            id=f"i-{region}", region_id=region, address="127.0.0.1", port=8080, created_at=timezone.now()
        )
        table = RoutingTable(region_id=region, revision=1, body={"pools": []}, reason="", created_at=timezone.now())
        assert bool(table_for_ingresses(table).hop_secrets) == (number == 1)
