"""Every vendored third-party file is listed with its digest, and no other file exists."""

import hashlib
import re
from pathlib import Path

STATIC = Path(__file__).parents[3] / "controlplane/dashboard/static"
VENDOR = STATIC / "vendor"
LISTED = dict(re.findall(r"^\| ([\w.-]+) \|.*\| ([0-9a-f]{64}) \|$", (VENDOR / "VENDOR.md").read_text(), re.MULTILINE))


def test_every_file_has_the_digest_that_is_listed() -> None:
    files = {path.name for path in VENDOR.iterdir()} - {"VENDOR.md"}
    assert {name for name in files if not name.endswith("-LICENSE.txt")} == set(LISTED)
    for name, digest in LISTED.items():
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == digest


NO_HOSTS = {"http://www.w3.org/2000/svg", "https://app.example"}
"""A namespace, and an example of a reserved name (RFC 2606)."""


def test_nothing_of_ours_names_another_host() -> None:
    ours = [*STATIC.glob("dashboard/*"), *(STATIC.parents[2] / "templates").rglob("*.html")]
    for path in ours:
        urls = set(re.findall(r"https?://[^\s\"'`]+", path.read_text())) - NO_HOSTS
        assert urls == set(), path
