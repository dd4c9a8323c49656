"""Unneeded releases are removed from database, disk and cache; code in use stays."""

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from fleet.machines.models import Machine
from fleet.reconcile.planning.states import AgentRolloutState, MachineState
from fleet.releases.models import AgentMove, AgentRelease, AgentRollout
from fleet.releases.services import releases as release_retention
from fleet.releases.services.archive import LEFT_AFTER_S, release_folder
from fleet.releases.services.releases import ARCHIVE_KEPT_S, releases_trim
from tests.fleet import rows
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db

OLD = [f"{number:016x}" for number in range(9)]
"""Oldest first; all but the last five are unneeded."""
OF_ANOTHER_HOME = "f" * 16


@pytest.fixture(autouse=True)
def home(settings: Any, tmp_path: Path) -> Path:
    """With a folder and an archive of each release, of the given ages."""
    settings.SWITCHYARD_HOME, settings.SWITCHYARD_CACHE = tmp_path / "home", tmp_path / "cache"
    for number, name in enumerate(OLD):
        AgentRelease.objects.create(
            id=name, version="0.1.0", protocol=2, created_at=NOW - timedelta(days=90 - number), is_current=number == 8
        )
        lay(name)
    lay(OF_ANOTHER_HOME, in_home=False)
    return tmp_path / "home"


def lay(name: str, *, in_home: bool = True, age_s: float = ARCHIVE_KEPT_S + 60) -> None:
    archive = release_folder("").parent.parent / "cache" / "agent" / f"cp311-x86_64-{name}.tar.gz"
    archive.parent.mkdir(parents=True, exist_ok=True)
    archive.touch()
    aged(archive, age_s)
    if in_home:
        (release_folder(name) / "engine_agent").mkdir(parents=True)
        aged(release_folder(name), age_s)


def aged(path: Path, age_s: float) -> None:
    os.utime(path, (NOW.timestamp() - age_s,) * 2)


def known() -> set[str]:
    return set(AgentRelease.objects.values_list("id", flat=True))


def folders() -> set[str]:
    return {path.name for path in release_folder("").iterdir()}


def cached(home: Path) -> set[str]:
    return {path.name[-23:-7] for path in (home.parent / "cache" / "agent").iterdir()}


def test_the_newest_stay_and_the_others_go(home: Path) -> None:
    assert set(releases_trim(now=NOW)) == set(OLD[:4])
    assert known() == folders() == set(OLD[4:])
    assert cached(home) == set(OLD[4:]), "of another home it is not kept by anybody for 30 days"
    assert releases_trim(now=NOW) == ()


def test_what_an_agent_runs_or_was_told_stays() -> None:
    rows.node("n-1", report={"agent_version": f"0.1.0+{OLD[0]}", "connected": False})
    rows.node("n-2", report={"agent_version": ""})
    AgentMove.objects.create(agent="n-2", release=OLD[1])
    AgentMove.objects.create(agent="n-gone", release=OLD[2])
    rows.machine("m-1", agent_version=f"0.1.0+{OLD[3]}", state=MachineState.GONE.value)
    assert set(releases_trim(now=NOW)) == {OLD[2], OLD[3]}
    assert {OLD[0], OLD[1]} <= known() & folders()


def test_machines_keep_what_they_run() -> None:
    rows.machine("m-1", agent_version=f"0.1.0+{OLD[3]}", state=MachineState.POOL.value)
    assert Machine.objects.count() == 1
    assert set(releases_trim(now=NOW)) == set(OLD[:3])


def rollout(source: str, target: str, state: AgentRolloutState = AgentRolloutState.SUCCEEDED) -> AgentRollout:
    return AgentRollout.objects.create(
        source_id=source, target_id=target, state=state.value, soak_s=1, actor="ada", created_at=NOW, ring_since=NOW
    )


def test_the_way_back_stays_and_rollouts_before_it_go_with_what_they_name() -> None:
    first = rollout(OLD[0], OLD[1])
    for _ in range(4):
        rollout(OLD[2], OLD[8])
    under_way = rollout(OLD[8], OLD[3], AgentRolloutState.RUNNING)
    last = rollout(OLD[2], OLD[8])
    assert set(releases_trim(now=NOW)) == {OLD[0], OLD[1]}
    assert not AgentRollout.objects.filter(pk=first.pk).exists()
    assert AgentRollout.objects.filter(pk__in=[under_way.pk, last.pk]).count() == 2


def test_what_became_needed_meanwhile_stays_with_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = release_retention._plan_removal(NOW)
    rollout(OLD[8], OLD[0])
    monkeypatch.setattr(release_retention, "_plan_removal", lambda now: planned)
    assert set(releases_trim(now=NOW)) == set(OLD[1:4])
    assert OLD[0] in known() & folders()


def test_what_something_runs_from_stays_on_disk_until_it_has_ended() -> None:
    environment = {**os.environ, "PYTHONPATH": f"{release_folder(OLD[0])}:/elsewhere"}
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=environment) as engine:
        try:
            releases_trim(now=NOW)
            assert OLD[0] not in known()
            assert folders() == {OLD[0], *OLD[4:]}
        finally:
            engine.kill()
    releases_trim(now=NOW)
    assert folders() == set(OLD[4:])


def test_what_is_younger_than_an_hour_may_not_be_known_yet(home: Path) -> None:
    lay("e" * 16, age_s=LEFT_AFTER_S - 60)
    releases_trim(now=NOW)
    assert "e" * 16 in folders() & cached(home)


def test_archives_that_are_kept_are_young_again_for_homes_beside(home: Path) -> None:
    releases_trim(now=NOW)
    for path in (home.parent / "cache" / "agent").iterdir():
        assert path.stat().st_mtime == pytest.approx(NOW.timestamp(), abs=1)


def test_a_host_without_any_release_has_nothing_to_remove(settings: Any, tmp_path: Path) -> None:
    settings.SWITCHYARD_HOME, settings.SWITCHYARD_CACHE = tmp_path / "new", tmp_path / "new-cache"
    assert set(releases_trim(now=NOW)) == set(OLD[:4])
