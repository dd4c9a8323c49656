"""A process outside the controller reports stale loops, unless it was paused itself."""

import pytest
from django.db import connection

from fleet.faults.models import Incident
from fleet.faults.services.watch import CHECK_EVERY_S, LOOP_STALE, ControlLoopWatch
from kernel.control_standing import STALE_AFTER_S
from kernel.loop_passes import loop_passed
from kernel.models import LoopPass
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db
LOOP = "fleet.reconcile"


class Web:
    """A web process with its own clock."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.watch = ControlLoopWatch(lambda: self.now_s)

    def check(self, *, for_s: float) -> None:
        end_s = self.now_s + for_s
        while self.now_s < end_s:
            self.now_s += CHECK_EVERY_S
            self.watch.check(NOW)


@pytest.fixture
def web() -> Web:
    LoopPass.objects.all().delete()
    loop_passed(LOOP, took_s=0.1)
    return Web()


def age(seconds: float) -> None:
    with connection.cursor() as cursor:
        cursor.execute("UPDATE kernel_looppass SET passed_at = clock_timestamp() - %s * interval '1 s'", [seconds])


def opened() -> list[str]:
    return list(Incident.objects.filter(kind=LOOP_STALE, state="open").values_list("subject", flat=True))


def test_a_loop_without_passes_is_an_incident_and_one_that_passes_again_is_none(web: Web) -> None:
    web.check(for_s=60.0)
    assert opened() == []
    age(31.0)
    web.check(for_s=CHECK_EVERY_S)
    assert opened() == [LOOP]
    web.check(for_s=60.0)
    assert Incident.objects.count() == 1
    loop_passed(LOOP)
    web.check(for_s=CHECK_EVERY_S)
    assert opened() == []
    assert Incident.objects.get().resolution == "it makes passes again"


def test_a_fleet_that_is_brought_up_after_a_day_opens_none(web: Web) -> None:
    age(86_400.0)
    web.check(for_s=STALE_AFTER_S - CHECK_EVERY_S)
    assert opened() == []
    loop_passed(LOOP)
    web.check(for_s=60.0)
    assert opened() == []


def test_a_host_that_was_stopped_with_both_on_it_opens_none(web: Web) -> None:
    web.check(for_s=60.0)
    web.now_s += 3600.0
    age(3600.0)
    web.check(for_s=CHECK_EVERY_S)
    loop_passed(LOOP)
    web.check(for_s=60.0)
    assert not Incident.objects.exists()


def test_a_database_that_knows_of_no_loop_says_nothing(web: Web) -> None:
    LoopPass.objects.all().delete()
    web.check(for_s=120.0)
    assert opened() == []
