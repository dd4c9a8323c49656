"""The page on dependencies gives a reason for each of them."""

import re

import pytest

from tests.docs.pages import text_of

PINNED = re.compile(r"^([A-Za-z0-9][\w.-]*)(\[[\w,]+\])?==", re.MULTILINE)
REASONS = text_of("docs/design/dependencies.md")


@pytest.mark.parametrize("file", ["requirements.txt", "requirements-dev.txt"])
def test_every_dependency_has_its_reason(file: str) -> None:
    names = [name for name, _ in PINNED.findall(text_of(file))]
    rows = " ".join(re.findall(r"^\| (.+?) \|", REASONS, re.MULTILINE))
    missing = [name for name in names if not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", rows)]
    assert names
    assert not missing, f"say in docs/design/dependencies.md why we need {', '.join(missing)} of {file}"
