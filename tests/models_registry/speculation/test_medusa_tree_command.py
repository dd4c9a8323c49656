"""From a calibration file to a file with a tree."""

import json
from io import StringIO
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command

from tests.models_registry.rows import DOCUMENT

ACCURACIES = [[0.6, 0.2, 0.1], [0.5, 0.1]]


@pytest.fixture
def calibration(tmp_path: Path) -> Path:
    file = tmp_path / "accuracies.json"
    file.write_text(json.dumps({"accuracies": ACCURACIES}))
    return file


def test_the_tree_goes_to_standard_output_and_what_it_is_worth_beside_it(calibration: Path) -> None:
    out, err = StringIO(), StringIO()
    call_command("medusa_tree", str(calibration), "--size", "4", stdout=out, stderr=err)
    assert json.loads(out.getvalue()) == [[0], [0, 0], [1], [2]]
    assert err.getvalue().strip() == (
        "4 paths on 2 heads, longest 2: 2.20 tokens per step expected, medusa_speculation_length 5"
    )


def test_the_tree_goes_to_a_file(calibration: Path, tmp_path: Path) -> None:
    output = tmp_path / "tree.json"
    arguments = [str(calibration), "--size", "2", "--depth", "1", "--output", str(output)]
    call_command("medusa_tree", *arguments, stderr=StringIO())
    assert json.loads(output.read_text()) == [[0], [1]]


def test_a_bare_list_of_heads_is_a_calibration_too(calibration: Path) -> None:
    calibration.write_text(json.dumps(ACCURACIES))
    out = StringIO()
    call_command("medusa_tree", str(calibration), "--size", "1", stdout=out, stderr=StringIO())
    assert out.getvalue() == "[[0]]\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not a calibration"),
        ('{"heads": []}', "is not a calibration"),
        ('{"accuracies": [["a"]]}', "is not a calibration"),
        ("[[0.7, 0.7]]", "accuracies of head 0 sum to 1.4000"),
    ],
)
def test_a_file_that_is_no_calibration_is_refused(calibration: Path, text: str, message: str) -> None:
    calibration.write_text(text)
    with pytest.raises(CommandError, match=message):
        call_command("medusa_tree", str(calibration))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"cannot read .*gone\.json: No such file"):
        call_command("medusa_tree", str(tmp_path / "gone.json"))


def test_accuracies_may_come_from_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", StringIO(json.dumps(ACCURACIES)))
    out = StringIO()
    call_command("medusa_tree", "-", "--size", "1", stdout=out, stderr=StringIO())
    assert out.getvalue() == "[[0]]\n"


def test_a_calibration_gives_the_paths_that_were_right_most_often(calibration: Path) -> None:
    calibration.write_text(json.dumps(DOCUMENT))
    out, err = StringIO(), StringIO()
    call_command("medusa_tree", str(calibration), "--task", "plan", "--size", "2", stdout=out, stderr=err)
    assert json.loads(out.getvalue()) == [[0], [0, 0]]
    assert err.getvalue().startswith("2 paths on 2 heads, longest 2: 2.75 tokens per step expected")
    with pytest.raises(CommandError, match="--task is 'code'; the calibration has plan, chat"):
        call_command("medusa_tree", str(calibration), "--task", "code")
    calibration.write_text(json.dumps(DOCUMENT | {"heads": 9}))
    with pytest.raises(CommandError, match="heads is 9"):
        call_command("medusa_tree", str(calibration))
