"""The memory of a version on the command line."""

import json
from pathlib import Path

import pytest

from tests.controlplane.api.client import bearer
from tests.controlplane.cli.conftest import Switchyard
from tests.models_registry.rows import draft, of_checkpoint, validated

pytestmark = pytest.mark.django_db


def test_it_shows_the_arithmetic_and_the_proposals(switchyard: Switchyard, tmp_path: Path) -> None:
    row = of_checkpoint(tmp_path / "model", parallelism={"p5.48xlarge": {"tp": 4}, "moon.base": {}})
    assert validated(row, tmp_path / "model").state == "passed"
    shown = switchyard("model", "memory", "toy@1")
    assert shown.code == 0, shown.err
    assert "KV cache per token" in shown.out
    assert "3,072 bytes" in shown.out
    document = json.loads(switchyard("model", "memory", "toy@1", "-o", "json").out)
    assert document == bearer().get("/api/v1/model-versions/toy@1/memory").json()
    assert all(each["instance_type"] in shown.out for each in document["proposals"])


def test_a_version_without_a_checkpoint_says_why(switchyard: Switchyard) -> None:
    draft()
    assert "no arithmetic: it names no artifact" in switchyard("model", "memory", "toy@1").out
