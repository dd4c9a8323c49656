"""Files of documents: every value keeps its file and line, and `on` and `off` stay strings."""

from pathlib import Path

import pytest

from controlplane.cli.documents import read_documents
from controlplane.cli.errors import Failure

FLEET = """\
# a comment
kind: FaultRule
metadata: {name: slow}
spec:
  mode: off
---
kind: Deployment
metadata:
  name: sim-70b
spec:
  regions:
    - region: us-east-1
      cells: 2
    - {region: us-west-2, cells: 3}
  drain_deadline_s: 1.5
  allow_unreleased: true
---
"""


def written(tmp_path: Path, text: str, name: str = "fleet.yaml") -> str:
    (tmp_path / name).write_text(text)
    return str(tmp_path / name)


def test_documents_are_read_in_their_order_and_words_stay_words(tmp_path: Path) -> None:
    rule, deployment = read_documents([written(tmp_path, FLEET)]).documents
    assert rule["spec"] == {"mode": "off"}
    assert deployment["spec"] == {
        "regions": [{"region": "us-east-1", "cells": 2}, {"region": "us-west-2", "cells": 3}],
        "drain_deadline_s": 1.5,
        "allow_unreleased": True,
    }


def test_where_each_value_stands_is_known(tmp_path: Path) -> None:
    name = written(tmp_path, FLEET)
    places = read_documents([name]).places
    assert places["documents.0.spec.mode"] == f"{name}:5"
    assert places["documents.1"] == f"{name}:7"
    assert places["documents.1.spec.regions.0.cells"] == f"{name}:13"
    assert places["documents.1.spec.regions.1"] == f"{name}:14"


def test_a_folder_is_all_of_its_files_by_name(tmp_path: Path) -> None:
    written(tmp_path, "{kind: B}", "b.yml")
    written(tmp_path, '{"kind": "A"}', "a.json")
    written(tmp_path, "no: document", "notes.txt")
    assert [one["kind"] for one in read_documents([str(tmp_path)]).documents] == ["A", "B"]


def test_a_list_of_documents_is_as_good(tmp_path: Path) -> None:
    written_so = read_documents([written(tmp_path, '[{"kind": "A"},\n {"kind": "B"}]', "list.json")])
    assert [one["kind"] for one in written_so.documents] == ["A", "B"]
    assert written_so.places["documents.1.kind"].endswith("list.json:2")


def test_dates_and_versions_stay_what_was_written(tmp_path: Path) -> None:
    (document,) = read_documents([written(tmp_path, "{a: 2026-11-21, b: 1.2.3, c: 12:30, d: ~, e: 012}")]).documents
    assert document == {"a": "2026-11-21", "b": "1.2.3", "c": "12:30", "d": None, "e": "012"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kind: A\nkind: B", "fleet.yaml:2: kind is a duplicate"),
        ("kind: [A", "fleet.yaml:1: "),
        ("a: b\n c: d", "fleet.yaml:2: "),
        ("- one\n- two", "fleet.yaml:1: a document must be an object"),
        ("# nothing", "no document in"),
        ("a: !!python/object:os.system {}", "fleet.yaml"),
    ],
)
def test_what_is_no_document_is_named_by_its_line(tmp_path: Path, text: str, message: str) -> None:
    name = written(tmp_path, text)
    if "python/object" in text:
        assert read_documents([name]).documents == ({"a": {}},), "tags make nothing"
        return
    with pytest.raises(Failure) as refused:
        read_documents([name])
    assert message in str(refused.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(Failure, match=r"cannot read .*none\.yaml: No such file"):
        read_documents([str(tmp_path / "none.yaml")])
