"""What is installed is locked: every package with version and hashes, and the locks are those of the lists."""

import re
from pathlib import Path

import pytest

from controlplane.lock import CHECKOUT, LOCKS, Lock, lists_digest, pins, pins_on

HASH = re.compile(r"    --hash=sha256:[0-9a-f]{64}( \\)?")


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: str(lock.path))
def test_a_lock_is_that_of_its_lists_and_hashes_everything(lock: Lock) -> None:
    text = (CHECKOUT / lock.path).read_text()
    assert f"# lists sha256 {lists_digest(lock)}\n" in text, "the list has changed: run `make lock`"
    wanted = {name: version for path in lock.lists for name, version in pins((CHECKOUT / path).read_text()).items()}
    missing = {name for name, version in wanted.items() if pins(text).get(name) != version}
    assert missing == set(lock.without)
    assert "://" not in text
    packages = [block for block in re.split(r"\n(?=\S)", text) if not block.startswith("#")]
    unhashed = [
        block for block in packages if not all(HASH.fullmatch(line) for line in block.strip("\n").split("\n")[1:])
    ]
    unhashed += [block for block in packages if "--hash" not in block]
    assert unhashed == []


def test_a_lock_of_wheels_keeps_the_versions_of_each_python() -> None:
    text = "a==1 \\\nb==2 ; python_version == '3.11' \\\nb==3 ; python_version == '3.12' \\\n"
    assert pins_on(text, "3.11") == {"a": "1", "b": "2"}
    assert pins_on(text, "3.12") == {"a": "1", "b": "3"}


def test_development_has_the_versions_of_production() -> None:
    production, development = (
        pins((CHECKOUT / name).read_text()) for name in ("requirements.lock", "requirements-dev.lock")
    )
    assert production.items() <= development.items()


def test_a_changed_list_has_another_digest(tmp_path: Path) -> None:
    lock = LOCKS[0]
    (tmp_path / "requirements.txt").write_text((CHECKOUT / "requirements.txt").read_text() + "httpx2==1.0\n")
    assert lists_digest(lock, tmp_path) != lists_digest(lock)


def test_names_are_compared_as_indexes_do() -> None:
    assert pins("PyYAML==6.0.3 \\\ndjango_filter[x]==26.2 ; python_version > '3'\n# a==1\n-r b") == {
        "pyyaml": "6.0.3",
        "django-filter": "26.2",
    }
