"""Calibrations on the command line: stored from files, and shown."""

import json
from pathlib import Path

import msgspec
import pytest

from engine_agent.protocol.load_messages import Load, SpeculationLoad
from tests.controlplane.cli.conftest import Switchyard
from tests.fleet import rows
from tests.models_registry.rows import DOCUMENT, STEP_COST, with_heads

pytestmark = pytest.mark.django_db


def test_one_is_stored_from_files_and_shown(switchyard: Switchyard, tmp_path: Path) -> None:
    version = with_heads()
    files = tmp_path / "calibration.json", tmp_path / "cost.json"
    for file, content in zip(files, (DOCUMENT, STEP_COST), strict=True):
        file.write_text(json.dumps(content))
    made = switchyard("speculation", "calibrate", "toy@1", str(files[0]), "--step-cost", str(files[1]))
    assert made.code == 0, made.err
    shown = switchyard("speculation", "show", "toy@1")
    assert shown.out == made.out
    assert "None of its cells guessed in the last hour." in shown.err
    assert "2 guessed tokens give 2.50 tokens per step" in shown.out
    assert json.loads(switchyard("speculation", "show", "toy@1", "-o", "json").out)["version"] == "toy@1"
    load = msgspec.to_builtins(Load(speculation=SpeculationLoad(600.0, 500, 1000, 700)))
    rows.cell("c-1", rows.node("n-00000001", report={"load": load}), model_version=version)
    told = switchyard("speculation", "show", "toy@1").out.splitlines()[-1].split()
    assert told == ["c-1", "10", "500", "2.0", "2.40"]


def test_a_file_that_is_not_there_is_named(switchyard: Switchyard) -> None:
    failed = switchyard("speculation", "calibrate", "toy@1", "gone.json")
    assert (failed.code, "cannot read gone.json" in failed.err) == (2, True)
