"""Calibrations are stored with their figures, and rejected if they do not fit the version. Over HTTP, operators store
them and everyone reads them.
"""

from typing import Any

import pytest
from django.db import DatabaseError

from kernel.access import Role
from kernel.models import Event
from kernel.refusals import InvalidInput
from models_registry.speculation.services import calibration_store
from models_registry.versions.models import ModelVersion, SpeculationCalibration
from models_registry.versions.selectors import chains_expected, latest_calibration
from tests.controlplane.access.callers import calls, make_user
from tests.fleet.rows import NOW
from tests.models_registry.rows import DIGEST, DOCUMENT, STEP_COST, stored, with_heads

pytestmark = pytest.mark.django_db


def store(version_id: int, document: Any = DOCUMENT, step_costs: Any = (STEP_COST,)) -> SpeculationCalibration:
    return calibration_store(version_id=version_id, document=document, step_costs=step_costs, actor="ada", now=NOW)


def test_what_follows_is_stored_beside_it_and_the_newest_counts() -> None:
    version = with_heads()
    first = store(version.pk, step_costs=())
    found = store(version.pk)
    assert latest_calibration(version) == found
    assert first.choices == []
    plan, chat = found.choices
    assert (plan["task"], plan["tokens"], plan["ranges"][-1][2]) == ("plan", 2, 0)
    assert (chat["task"], chat["tokens"], chat["off_from"]) == ("chat", 0, 1)
    assert chains_expected([version.pk])[version.pk]["plan"] == pytest.approx((1.0, 2.0, 2.5))
    event = Event.objects.filter(kind="version.calibrated").latest("id")
    assert event.detail == {"version": "toy@1", "calibration": found.pk}
    assert event.message == "toy@1 calibrated by ada: plan 2.50 tokens per step, chat 1.05 tokens per step"


@pytest.mark.parametrize(
    ("speculation", "document", "message"),
    [
        ({}, {}, "does not have format 1"),
        ({"tokens": 3}, DOCUMENT, "the calibration has 2 heads; toy@1 uses 3"),
        (
            {},
            DOCUMENT | {"model": "sha256:00"},
            f"has answers of sha256:00, but toy@1 serves {DIGEST}; train heads for",
        ),
    ],
)
def test_what_is_of_something_else_is_refused(speculation: Any, document: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        store(with_heads(**speculation).pk, document)
    assert not SpeculationCalibration.objects.exists()


def test_a_version_without_heads_has_no_calibration() -> None:
    with pytest.raises(InvalidInput, match="toy@1 uses speculation method none; a calibration is for medusa"):
        store(stored("released").pk)


def test_heads_may_be_of_some_instance_types_only() -> None:
    version = with_heads()
    plain: dict[str, dict[str, int]] = {"local.cpu": {}, "p5.48xlarge": {}}
    ModelVersion.objects.update(parallelism=plain, by_type={"local.cpu": {"speculation": {}}})
    assert store(version.pk, step_costs=[{**STEP_COST, "instance_type": "p5.48xlarge"}]).choices
    with pytest.raises(InvalidInput, match=r"has local.cpu; toy@1 uses these heads on p5.48xlarge"):
        store(version.pk)
    ModelVersion.objects.update(
        by_type={kind: {"artifact_uri": "file:///o", "artifact_digest": DIGEST} for kind in plain}
    )
    assert store(version.pk).choices
    ModelVersion.objects.update(by_type={kind: {"speculation": {}} for kind in plain})
    with pytest.raises(
        InvalidInput, match=r"toy@1 on local.cpu uses speculation method none; a calibration is for medusa"
    ):
        store(version.pk)


def test_step_costs_are_read_before_anything_is_stored() -> None:
    version = with_heads()
    several: tuple[list[dict[str, Any]], ...] = ([{}], [STEP_COST] * 9)
    for wrong in several:
        with pytest.raises(InvalidInput) as refused:
            store(version.pk, step_costs=wrong)
        assert refused.value.field == "step_costs"


def test_what_is_stored_is_never_changed() -> None:
    row = store(with_heads().pk)
    with pytest.raises(DatabaseError, match="a calibration is never changed; store another"):
        SpeculationCalibration.objects.filter(pk=row.pk).update(choices=[])


URL = "/api/v1/model-versions/toy@1"


def store_over_http(role: Role, **changes: Any) -> Any:
    body = {"calibration": DOCUMENT, "step_costs": [STEP_COST], **changes}
    return calls(make_user(role.value, role)).post(f"{URL}/calibrate", body, format="json")


def test_an_operator_stores_one_and_a_viewer_reads_it() -> None:
    with_heads()
    viewer = calls(make_user("vera", Role.VIEWER))
    assert viewer.get(f"{URL}/calibration").status_code == 404
    stored = store_over_http(Role.OPERATOR).json()
    assert stored["version"] == "toy@1"
    assert stored["figures"][0]["chain"][0] == 1.0
    assert viewer.get(f"{URL}/calibration").json() == stored
    assert store_over_http(Role.VIEWER).status_code == 403


def test_what_is_wrong_is_named() -> None:
    with_heads()
    refused = store_over_http(Role.OPERATOR, calibration=DOCUMENT | {"heads": 9})
    assert refused.status_code == 400
    assert "heads is 9; it must be a whole number from 1 to 8" in refused.text
