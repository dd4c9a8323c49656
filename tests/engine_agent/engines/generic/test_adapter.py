"""A third-party program is started as its plan states, from the machine's list; features that it lacks are refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine_agent.engines.base import EngineUnavailable
from engine_agent.engines.generic.adapter import GenericAdapter
from engine_agent.engines.generic.environment import installed_programs
from engine_agent.engines.registry import check_plan
from engine_agent.protocol.messages import Artifact, Assignment, EnginePlan, Peer
from tests.engine_agent.engines.contexts import PORT_BASE, context, leader_order, not_plain

NODE = context(**{"generic/own": "/cache/engines/generic/own/serve"})
PLAN = EnginePlan(
    engine="generic",
    served_model="tiny",
    max_concurrency=1,
    ready_timeout_s=60.0,
    artifact=Artifact("file:///srv/tiny", "sha256:" + "0" * 64),
    args=("--context-length", "2048", "--command", "own", "--n-threads", "2"),
    widened=("--command", "--n-threads"),
)


def assignment(*peers: Peer, **plan: Any) -> Assignment:
    return leader_order(PLAN, *peers, **plan)


def test_it_becomes_the_program_that_the_machine_has() -> None:
    launch = GenericAdapter().launch(assignment(), NODE)
    words = launch.argv[1:]
    assert words[:4] == ("-m", "engine_agent.engines.generic.serve", "--node-id", "n-00000001")
    assert words[words.index("--program") + 1] == "/cache/engines/generic/own/serve"
    assert words[words.index("--") + 1 :] == ("--context-length", "2048", "--n-threads", "2")
    assert launch.reads == (Path("/cache/engines/generic/own"), Path("/srv/tiny"))
    assert GenericAdapter().health_url(assignment(), NODE) == f"http://127.0.0.1:{PORT_BASE + 3}/v1/models"


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        *not_plain(PLAN),
        (assignment(args=("--n-threads", "2")), "needs --command"),
        (assignment(args=("--command", "other")), "no program 'other'; it has own"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(wrong: Assignment, why: str) -> None:
    with pytest.raises(EngineUnavailable, match=why):
        GenericAdapter().launch(wrong, NODE)


def test_a_program_or_an_option_beyond_the_lists_takes_an_admin() -> None:
    check_plan(PLAN)

    other = msgspec.structs.replace(PLAN, args=("--command", "other"), widened=())
    with pytest.raises(EngineUnavailable, match=r"--command is 'other'; an admin can allow it \(engine-allowances\)"):
        check_plan(other)
    check_plan(msgspec.structs.replace(other, widened=("--command",)))
    with pytest.raises(EngineUnavailable, match="--hf-model-repo"):
        check_plan(msgspec.structs.replace(PLAN, args=(*PLAN.args, "--hf-model-repo", "x")))


def test_only_executables_of_the_machines_own_folder_are_programs(tmp_path: Path) -> None:
    for name, mode in {"own": 0o755, "not-executable": 0o644, "Bad_Name": 0o755}.items():
        program = tmp_path / "engines" / "generic" / name / "serve"
        program.parent.mkdir(parents=True)
        program.write_text("#!/bin/sh\n")
        program.chmod(mode)
    assert list(installed_programs(tmp_path)) == ["generic/own"]
    assert installed_programs(tmp_path / "nowhere") == {}


def test_the_node_has_no_program_at_all() -> None:
    with pytest.raises(EngineUnavailable, match="it has none: put one at engines/generic/own/serve"):
        GenericAdapter().launch(assignment(), replace(NODE, engine_pythons={}))
