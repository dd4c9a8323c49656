"""Resources from the OpenAPI document: every list of the API, existing columns, and the cached copy."""

import json
import os
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from controlplane.cli import schema
from controlplane.cli.main import main
from controlplane.cli.resources import Resource
from controlplane.cli.schema import entries_of, resource_of, resources_known
from controlplane.cli.server_target import ConnectionOptions
from controlplane.cli.session import Session
from tests.controlplane.api.client import document, lists, resolved


def resources() -> list[Resource]:
    return [resource_of(entry) for entry in entries_of(document())]


def test_every_list_of_the_api_is_a_resource() -> None:
    assert {f"/api/v1/{one.path}" for one in resources()} == set(lists())


def test_every_name_of_a_resource_is_used_once() -> None:
    names = [name for one in resources() for name in one.names]
    assert len(names) == len(set(names))


def fields_of(path: str) -> Mapping[str, Any]:
    page = resolved(
        document()["paths"][f"/api/v1/{path}"]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    )
    return dict(resolved(page["properties"]["results"]["items"])["properties"])


def test_columns_and_keys_are_fields() -> None:
    wrong = [
        f"{entry['path']}: {named}"
        for entry in entries_of(document())
        for named in (entry["key"], *(column for column, _ in entry["columns"]))
        if (field := first_field(named)) and field not in fields_of(entry["path"])
    ]
    assert wrong == []


def first_field(column: str) -> str:
    title, sign, source = column.partition("=")
    return (source if sign else title.lower().replace(" ", "_")).partition(":")[0].partition(".")[0]


def served(tmp_path: Path, answers: list[Any]) -> Session:
    """A session whose server gives these responses in order, then none."""

    def answer(request: httpx.Request) -> httpx.Response:
        if not answers:
            raise httpx.ConnectError("nothing here")
        return httpx.Response(200, json=answers.pop(0))

    options = ConnectionOptions(server="http://testserver")
    return Session(options=options, environ={"HOME": str(tmp_path)}, transport=httpx.MockTransport(answer))


def test_the_document_is_fetched_once_an_hour(tmp_path: Path) -> None:
    first = resources_known(served(tmp_path, [document()]))
    assert {one.name for one in first} >= {"cells", "regions"}
    assert {one.name for one in resources_known(served(tmp_path, []))} == {one.name for one in first}
    (kept,) = (tmp_path / ".cache/switchyard").iterdir()
    long_ago = time.time() - 2 * schema.FRESH_S
    os.utime(kept, (long_ago, long_ago))
    newer = {**document(), "paths": {"/api/v1/cells": document()["paths"]["/api/v1/cells"]}}
    assert [one.name for one in resources_known(served(tmp_path, [newer]))] == ["cells"]


def test_what_is_not_in_a_copy_is_looked_up_anew(tmp_path: Path) -> None:
    older = {**document(), "paths": {"/api/v1/cells": document()["paths"]["/api/v1/cells"]}}
    run = served(tmp_path, [older, document()])
    assert run.resource("cell").path == "cells"
    assert run.resource("Regions").path == "regions"


def test_without_a_server_an_old_copy_counts_then_this_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = entries_of(document())[:1]
    monkeypatch.setattr(schema, "_of_this_checkout", lambda: own)
    assert [one.path for one in resources_known(served(tmp_path / "a", []))] == [own[0]["path"]]
    (kept,) = (tmp_path / "a/.cache/switchyard").iterdir()
    kept.write_text(json.dumps(entries_of(document())))
    os.utime(kept, (0, 0))
    assert len(resources_known(served(tmp_path / "a", []))) == len(resources())


def test_help_of_what_can_be_created_works_without_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the document of this checkout, which its management command prints; the long run starts that."""

    def printed(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[1:] == ["manage.py", "spectacular", "--format", "openapi-json"]
        return subprocess.CompletedProcess(command, 0, stdout=json.dumps(document()))

    monkeypatch.setattr(subprocess, "run", printed)
    assert main(["create", "region", "--help"], served(tmp_path, [])) == 0
    assert "--ingress-url" in capsys.readouterr().out
