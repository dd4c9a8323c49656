"""A host that joins runs what was unpacked before: engines have accounts of their own there."""

import os
from pathlib import Path
from typing import Any, cast

import pytest

from engine_agent.node.enrolment import Enrolment
from engine_agent.node.machine import join, service
from engine_agent.node.machine.control import JoinClient
from engine_agent.node.machine.paths import HostPaths, Joined
from engine_agent.protocol.machine_messages import MachineFacts
from tests.engine_agent.node.machine.made_releases import NEW, files, put


def test_engines_of_other_accounts_can_run_what_was_unpacked_under_any_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def enrol(_: Enrolment) -> str:
        return "secret"

    monkeypatch.setattr(Enrolment, "enrol", enrol)
    monkeypatch.setattr(service, "start", lambda _: "")
    monkeypatch.setattr(join, "_await_order", lambda _: None)
    paths = HostPaths(tmp_path / "code")
    before = os.umask(0o077)
    try:
        release = put(paths, "new", files(NEW))
        client = JoinClient("http://127.0.0.1:9", "", "token")
        facts = MachineFacts("10.0.0.7", 21000, cores=8, memory_bytes=2**35, disk_free_bytes=2**38)
        joined = Joined("http://127.0.0.1:9", facts)
        cast(Any, join)._install(paths, release, client, joined, {"bundle": "", "region": "us-east-1"}, "ab" * 32)
    finally:
        os.umask(before)
    assert paths.current.resolve() == release
    modes = {path.stat().st_mode & 0o777 for path in (release, *release.rglob("*"))}
    assert modes == {0o755, 0o644}
