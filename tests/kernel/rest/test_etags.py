"""ETags change with every byte; a write is refused only if what was decided has changed."""

import pytest

from kernel.rest.view_sets import etag_of, is_named, permits

MEASURED = frozenset({"load"})
CELL = {"id": "c", "state": "ready", "load": {"in_flight": 1}, "nodes": [{"id": "n", "load": 3}]}
BUSIER = {**CELL, "load": {"in_flight": 2}, "nodes": [{"id": "n", "load": 4}]}
STOPPED = {**CELL, "state": "stopped"}


def test_the_same_representation_has_the_same_tag_whatever_the_order_of_its_fields_was() -> None:
    assert etag_of(CELL, MEASURED) == etag_of(dict(CELL), MEASURED)


def test_it_is_strong_and_in_quotes() -> None:
    tag = etag_of(CELL, MEASURED)
    assert tag.startswith('"')
    assert tag.endswith('"')


@pytest.mark.parametrize("other", [BUSIER, STOPPED])
def test_it_changes_with_every_change(other: dict[str, object]) -> None:
    assert etag_of(other, MEASURED) != etag_of(CELL, MEASURED)


@pytest.mark.parametrize(
    ("present", "allowed"), [(CELL, True), (BUSIER, True), (STOPPED, False)], ids=["same", "busier", "stopped"]
)
def test_a_write_goes_on_while_only_measurements_have_changed(present: dict[str, object], allowed: bool) -> None:
    assert permits(etag_of(present, MEASURED), etag_of(CELL, MEASURED)) is allowed


def test_one_of_several_tags_is_enough() -> None:
    assert permits(etag_of(CELL), f'"old", {etag_of(CELL)}')


def test_any_present_thing_will_do_for_a_star() -> None:
    assert permits(etag_of(CELL), "*")
    assert is_named(etag_of(CELL), "*")


def test_a_weak_tag_permits_no_write_but_saves_a_read() -> None:
    weak = f"W/{etag_of(CELL)}"
    assert not permits(etag_of(CELL), weak)
    assert is_named(etag_of(CELL), weak)


def test_a_read_is_saved_only_if_nothing_at_all_has_changed() -> None:
    assert not is_named(etag_of(BUSIER, MEASURED), etag_of(CELL, MEASURED))
