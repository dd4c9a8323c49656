"""Samples of requests are stored in groups, once, and only for the cell that a node leads."""

from collections import Counter
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from django.db import connection
from django.db.models import Func

from engine_agent.protocol.codec import BadMessage, decode_up, encode
from engine_agent.protocol.request_messages import MAX_WINDOW_SAMPLES, RequestSample, RequestWindow, SampleKind
from fleet.requests.models import RequestSample as Stored
from fleet.requests.planner import INDEX_BYTES
from fleet.requests.selectors import failed_requests_of_keys, requests_between, requests_compared, requests_named
from fleet.requests.services import ingress_windows_store, request_samples_trim, request_windows_store
from kernel.time_ranges import last
from tests.fleet import rows
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db
AT = NOW.timestamp()
SPAN = last("1h", NOW)


def sample(name: str, kind: SampleKind = SampleKind.UNIFORM, **more: Any) -> RequestSample:
    return msgspec.structs.replace(RequestSample(name, AT - 5, kind, 200, 120.5), **more)


def window(*samples: RequestSample, cell: str = "c1", generation: int = 1) -> RequestWindow:
    return RequestWindow(cell, generation, AT - 30, len(samples), 0, samples)


@pytest.fixture(autouse=True)
def cell() -> None:
    rows.cell("c1", rows.node("n-1"), rows.node("n-2"))
    rows.cell("c2", rows.node("n-3"), rows.node("n-4"))


def store(node: str, *windows: RequestWindow) -> int:
    return request_windows_store(windows=[(node, each) for each in windows], now=NOW)


def test_windows_of_several_cells_are_stored_in_one_statement() -> None:
    both = [("n-1", window(sample("r-1"), sample("r-2"))), ("n-3", window(sample("r-3"), cell="c2"))]
    assert request_windows_store(windows=both, now=NOW) == 3
    stored = Stored.objects.get(request="r-1")
    assert (stored.cell, stored.deployment, stored.region, stored.generation) == ("c1", "sim-70b", "us-east-1", 1)
    assert stored.at == NOW - timedelta(seconds=5)
    assert len(requests_compared(requests_between(SPAN, deployment="sim-70b"))) == 3
    assert len(requests_compared(requests_between(SPAN, cell="c2"))) == 1


def test_the_same_window_is_stored_once() -> None:
    assert (store("n-1", window(sample("r-1"))), store("n-1", window(sample("r-1")))) == (1, 0)


@pytest.mark.parametrize(
    ("node", "sent"),
    [
        ("n-1", window(sample("r-1"), cell="c2")),
        ("n-2", window(sample("r-1"))),
        ("n-1", window(sample("r-1"), generation=2)),
        ("n-1", window(sample("r-1"), cell="other")),
        ("n-9", window(sample("r-1"))),
    ],
    ids=["another cell", "a follower", "another generation", "no cell", "an unknown node"],
)
def test_a_node_writes_rows_of_the_cell_that_it_leads_alone(node: str, sent: RequestWindow) -> None:
    assert (store(node, sent), Stored.objects.count()) == (0, 0)


@pytest.mark.parametrize("at", [0.0, AT - 7300, AT + 61, 1e11])
def test_a_row_of_another_time_is_dropped(at: float) -> None:
    assert store("n-1", window(sample("r-1", at=at), sample("r-2"))) == 1


def test_a_node_writes_only_its_share_of_rows(settings: Any) -> None:
    settings.REQUEST_SAMPLES = 2880 * 2 * 3 * 4  # four of each kind for each of two cells
    settings.FAILED_REQUESTS_MIB = 1
    kinds = [kind for kind in SampleKind for _ in range(16)]
    assert store("n-1", window(*(sample(f"r-{n}", kind) for n, kind in enumerate(kinds)))) == 4 + 4 + 4 + 1
    assert set(Stored.objects.filter(kind="slow").values_list("request", flat=True)) == {
        f"r-{n}" for n in range(16, 20)
    }


@pytest.mark.parametrize(
    "wrong",
    [
        {"request": "r" * 129},
        {"tenant": "t" * 65},
        {"prompt_tokens": -1},
        {"prompt_tokens": 10**10},
        {"total_ms": 1e12},
        {"status": 1000},
    ],
    ids=str,
)
def test_oversized_rows_are_no_message(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadMessage):
        decode_up(encode(window(sample("r-1", **wrong))))
    with pytest.raises(BadMessage):
        decode_up(encode(window(*(sample(f"r-{n}") for n in range(MAX_WINDOW_SAMPLES + 1)))))


def test_text_that_postgresql_cannot_store_harms_no_other_row() -> None:
    assert store("n-1", window(sample("a\x00b"), sample("r-2"))) == 2
    assert Stored.objects.filter(request="a�b").exists()


def test_old_samples_and_the_oldest_above_the_limit_are_deleted(settings: Any) -> None:
    store("n-1", window(*(sample(f"r-{n}", at=AT - n) for n in range(10))))
    Stored.objects.filter(request="r-9").update(at=NOW - timedelta(hours=25))
    request_samples_trim(now=NOW)
    assert Stored.objects.count() == 9
    settings.REQUEST_SAMPLES = 4
    request_samples_trim(now=NOW)
    assert set(Stored.objects.values_list("request", flat=True)) == {"r-0", "r-1", "r-2", "r-3", "r-4"}


def failed(count: int, kind: SampleKind, **columns: Any) -> None:
    own = {"status": 401, "total_ms": 1.0, "generation": 1, "cell": "", "region": "us-east-1", "tenant": "acme"}
    Stored.objects.bulk_create(
        Stored(request=f"{kind}-{n}", at=NOW - timedelta(seconds=n), kind=kind, **{**own, **columns})
        for n in range(count)
    )


def test_failed_samples_are_kept_for_a_week_within_their_bytes_whatever_is_refused(settings: Any) -> None:
    store("n-1", window(sample("r-1")))
    failed(20, SampleKind.ERROR)
    failed(700, SampleKind.REFUSED)
    Stored.objects.exclude(kind=SampleKind.REFUSED).update(at=NOW - timedelta(days=3))
    settings.FAILED_REQUESTS_MIB = 1
    request_samples_trim(now=NOW)
    kept = Counter(Stored.objects.values_list("kind", flat=True))
    assert set(kept) == {"error", "refused"}
    assert kept["error"] == 20
    assert 200 < kept["refused"] < 400  # 256 KiB
    assert Stored.objects.filter(request="refused-0").exists()
    request_samples_trim(now=NOW + timedelta(days=4, seconds=1))
    assert not Stored.objects.filter(kind=SampleKind.ERROR).exists()


def test_a_row_takes_no_more_bytes_than_the_budget_assumes() -> None:
    failed(2000, SampleKind.ERROR, key="1a2b3c4d", deployment="sim-70b", cell="sim-70b-us-east-1-1")
    Stored.objects.update(request=Func(function="gen_random_uuid", template="md5(%(function)s()::text)"))
    with connection.cursor() as cursor:
        cursor.execute("REINDEX TABLE fleet_requestsample")
        cursor.execute("SELECT pg_indexes_size('fleet_requestsample')")
        (size,) = cursor.fetchone()
    assert size / 2000 < INDEX_BYTES


def test_the_hash_of_a_beginning_is_stored_under_a_key_of_the_tenant(settings: Any) -> None:
    alike = "00ab12cd34ef"
    store("n-1", window(*(sample(f"r-{n}", tenant=f"t-{n // 2}", prefix=alike) for n in range(4)), sample("r-4")))
    first, second, other, *_ = found = [Stored.objects.get(request=f"r-{n}").prefix for n in range(5)]
    assert first == second
    assert len({first, other, alike}) == 3
    assert [len(prefix) for prefix in found] == [12, 12, 12, 12, 0]
    settings.SECRET_KEY = "another"
    store("n-1", window(sample("r-5", tenant="t-0", prefix=alike)))
    assert Stored.objects.get(request="r-5").prefix != first


# Of ingresses.


def refused(name: str, key: str = "", **more: Any) -> RequestSample:
    return sample(name, SampleKind.ERROR, status=429, key=key, reason="rate_limit_exceeded", **more)


def from_ingress(*samples: RequestSample) -> int:
    windows = [("i-1", "us-east-1", RequestWindow("", 0, AT - 30, 0, len(samples), samples))]
    return ingress_windows_store(windows=windows, tenants={"1a2b": "acme"}, now=NOW)


def test_a_row_of_an_ingress_has_the_tenant_of_its_key_and_nothing_else_that_it_claims() -> None:
    claims = {"tenant": "other", "ingress": "i-9", "prompt_tokens": 5, "adapter": "x", "prefix": "ab"}
    assert from_ingress(refused("r-1", "1a2b", deployment="sim-70b", **claims), refused("r-2", "ffff", **claims)) == 2
    known, unknown = Stored.objects.get(request="r-1"), Stored.objects.get(request="r-2")
    assert (known.kind, known.tenant, known.key, known.ingress) == ("error", "acme", "1a2b", "i-1")
    assert (known.cell, known.region, known.deployment, known.prompt_tokens) == ("", "us-east-1", "sim-70b", 0)
    assert (unknown.kind, unknown.tenant, unknown.key, unknown.adapter, unknown.prefix) == ("refused", "", "", "", "")


def test_an_ingress_writes_only_its_share_of_a_window() -> None:
    with_key = [refused(f"k-{n}", "1a2b") for n in range(40)]
    assert from_ingress(*with_key, *(refused(f"u-{n}") for n in range(24))) == 32 + 16
    assert from_ingress(refused("late", at=AT - 7300)) == 0


def test_a_node_writes_no_row_of_an_ingress() -> None:
    assert store("n-1", window(refused("r-1"), cell="", generation=0)) == 0
    assert store("n-1", window(sample("r-2", SampleKind.REFUSED))) == 0


def test_a_request_is_found_by_the_beginning_of_its_id() -> None:
    store("n-1", window(sample("9f1c0de4a2b3"), sample("100%_de4")))
    assert [each.request for each in requests_named("9f1c0de")] == ["9f1c0de4a2b3"]
    assert list(requests_named("9f1c")) == []
    assert list(requests_named("______%")) == []


def test_failed_requests_are_found_by_key_and_deployment() -> None:
    own = sample("r-1", SampleKind.ERROR, key="1a2b", status=500)
    store("n-1", window(own, sample("r-2", key="1a2b"), sample("r-3", SampleKind.ERROR, status=500)))
    found = failed_requests_of_keys([("1a2b", "sim-70b")], NOW)
    assert [each.request for each in found] == ["r-1"]
    for others in ([("1a2b", "other")], [("", "sim-70b")], []):
        assert list(failed_requests_of_keys(others, NOW)) == []
