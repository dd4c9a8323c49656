"""Profiles have tokens, so only their owner may read them."""

import stat
from pathlib import Path

import pytest

from controlplane.cli.errors import Failure
from controlplane.cli.profiles import Profile, Profiles, profiles_file, read_profiles, write_profiles

KEPT = Profiles("a", {"a": Profile("https://a", "sw_a"), "b": Profile("https://b", "sw_b")})


def test_what_is_written_is_read_and_only_by_its_owner(tmp_path: Path) -> None:
    path = profiles_file({"HOME": str(tmp_path)})
    assert path == tmp_path / ".config" / "switchyard" / "profiles.json"
    write_profiles(path, KEPT)
    assert read_profiles(path) == KEPT
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [one.name for one in path.parent.iterdir()] == ["profiles.json"]


def test_without_a_file_there_is_no_profile(tmp_path: Path) -> None:
    assert read_profiles(tmp_path / "none.json") == Profiles()


def test_a_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profiles.json"
    write_profiles(path, KEPT)
    path.chmod(0o644)
    with pytest.raises(Failure, match="chmod 600"):
        read_profiles(path)


@pytest.mark.parametrize("text", ["", "[]", '{"profiles": {"a": {"host": "x"}}}', '{"profiles": 3}'])
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "profiles.json"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(Failure, match=r"profiles\.json is damaged"):
        read_profiles(path)


def test_forgetting_the_current_profile_leaves_none_current() -> None:
    assert KEPT.without("a") == Profiles("", {"b": Profile("https://b", "sw_b")})
    assert KEPT.without("b").current == "a"
