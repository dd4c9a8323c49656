"""Calibrations over HTTP: stored by operators, read by all."""

from typing import Any

import pytest

from kernel.access import Role
from tests.controlplane.access.callers import calls, make_user
from tests.models_registry.calibrations import DOCUMENT, STEP_COST, with_heads

pytestmark = pytest.mark.django_db

URL = "/api/v1/model-versions/toy@1"


def store(role: Role, **changes: Any) -> Any:
    body = {"calibration": DOCUMENT, "step_costs": [STEP_COST], **changes}
    return calls(make_user(role.value, role)).post(f"{URL}/calibrate", body, format="json")


def test_an_operator_stores_one_and_a_viewer_reads_it() -> None:
    with_heads()
    viewer = calls(make_user("vera", Role.VIEWER))
    assert viewer.get(f"{URL}/calibration").status_code == 404
    stored = store(Role.OPERATOR).json()
    assert stored["version"] == "toy@1"
    assert stored["figures"][0]["chain"][0] == 1.0
    assert viewer.get(f"{URL}/calibration").json() == stored
    assert store(Role.VIEWER).status_code == 403


def test_what_is_wrong_is_named() -> None:
    with_heads()
    refused = store(Role.OPERATOR, calibration=DOCUMENT | {"heads": 9})
    assert refused.status_code == 400
    assert "heads is 9; it must be a whole number from 1 to 8" in refused.text
