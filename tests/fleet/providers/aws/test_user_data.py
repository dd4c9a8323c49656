"""The first boot: small, without secrets, runs what the control plane sends, tries again, and ends what never joins."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.providers.aws.user_data import BYTES_MOST, user_data
from tests.fleet.providers.aws.requests import BOOT

FAKES = {
    "curl": 'echo "curl $*" >>"$LOG"; while [ "$1" != -o ]; do shift; done; cp "$SENT" "$2"',
    "sleep": 'echo "sleep" >>"$LOG"; echo 9999999999 >"$CLOCK"',
    "shutdown": 'echo "shutdown $*" >>"$LOG"',
    "date": 'cat "$CLOCK"',
    "mkdir": "exit 0",
    "lsblk": "exit 0",
}
"""Of what the script calls; what they do stands in `LOG`."""


def boot(folder: Path, sent: str) -> tuple[str, str]:
    """What the script printed, and what it called, on a machine to which the control plane sends this script."""
    commands = folder / "bin"
    commands.mkdir()
    for name, text in FAKES.items():
        (commands / name).write_text(f"#!/bin/sh\n{text}\n")
        (commands / name).chmod(0o755)
    (folder / "sent").write_text(sent)
    (folder / "clock").write_text("1000\n")
    (folder / "log").touch()
    known = {"PATH": f"{commands}:/usr/bin:/bin", "TMPDIR": str(folder)}
    files = {"LOG": str(folder / "log"), "SENT": str(folder / "sent"), "CLOCK": str(folder / "clock")}
    done = subprocess.run(
        ["/bin/sh", "-c", user_data(BOOT)], env=known | files, capture_output=True, text=True, timeout=30, check=False
    )
    assert not done.stderr
    return done.stdout, (folder / "log").read_text()


def test_a_machine_runs_what_the_control_plane_sends_and_knows_who_it_is(tmp_path: Path) -> None:
    names = ("SERVER", "PIN", "AWS_REGION", "INSTALL", "UNIT")
    printed, called = boot(tmp_path, "".join(f"echo {name}=${name}\n" for name in names))
    assert printed.splitlines() == [
        "SERVER=https://switchyard.example:8443",
        f"PIN=sha256//{'A' * 43}=",
        "AWS_REGION=us-east-1",
        "INSTALL=sw-0123456789ab",
        "UNIT=u-0a1b2c3d",
        "switchyard: joined",
    ]
    assert called.startswith(
        "curl -fsS --noproxy * --proto =https --connect-timeout 10 --max-time 60 -k --pinnedpubkey"
    )
    assert called.rstrip().endswith("https://switchyard.example:8443/join/aws")


def test_one_that_never_joins_tries_again_and_then_ends(tmp_path: Path) -> None:
    printed, called = boot(tmp_path, "exit 1\n")
    assert [line.split()[0] for line in called.splitlines()] == ["curl", "sleep", "curl", "shutdown"]
    assert "could not join https://switchyard.example:8443 within 3600 s, and ends" in printed


def test_it_is_a_script_of_any_shell_and_far_below_the_limit() -> None:
    text = user_data(replace(BOOT, server=f"https://{'a' * 260}", pin=";".join([BOOT.pin] * 8)))
    assert text.startswith("#!/bin/sh\n")
    assert len(text.encode()) < BYTES_MOST / 2
    subprocess.run(["/bin/sh", "-n"], input=text, text=True, timeout=30, check=True)


@pytest.mark.parametrize("field", ["server", "pin", "region", "install", "unit"])
@given(st.text(alphabet="a-'\"$`;\n \\/é", min_size=1, max_size=12).filter(lambda text: text.strip("a-") != ""))
def test_nothing_gets_into_the_script_that_has_another_form(field: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"{field} .* has not the form"):
        user_data(replace(BOOT, **{field: text}))
