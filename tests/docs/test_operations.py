"""The operators' pages name every variable that the control plane reads, and the index every runbook."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
READERS = ("controlplane/settings.py", "controlplane/embedded/configuration.py")
VARIABLE = re.compile(r'"((?:SWITCHYARD_\w+)|DATABASE_URL|REDIS_URL|ENGINE|WAIT_S)"')
RUNBOOKS = ROOT / "docs/runbooks"


def test_every_variable_is_explained() -> None:
    read = {name for path in READERS for name in VARIABLE.findall((ROOT / path).read_text(encoding="utf-8"))}
    explained = set(
        re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/operations.md").read_text(encoding="utf-8"), re.MULTILINE)
    )
    assert len(read) > 10
    assert read <= explained


def test_every_runbook_is_in_the_index() -> None:
    listed = set(re.findall(r"\]\(([\w-]+\.md)\)", (RUNBOOKS / "README.md").read_text(encoding="utf-8")))
    assert listed == {path.name for path in RUNBOOKS.glob("*.md")} - {"README.md"}
