"""The script of the line: nothing that it starts has the invitation's token among its arguments or variables."""

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

from django.template.loader import render_to_string

TOKEN = f"sw_{8 * '5'}_{48 * 'a'}"
DIGEST = 64 * "d"
PROGRAM = f"""#!/bin/sh
{{ printf '%s\\n' "$0 $*"; env; }} >>"$TOLD"
if [ "${{0##*/}}" = curl ]; then cat >>"$READ"; exit; fi
case "$*" in
  *"import platform"*) echo cp311-test ;;
  *"import hashlib"*) echo {DIGEST} ;;
  *"-m venv"*)
    for last; do :; done
    mkdir -p "$last/bin" "$last/lib/python3/site-packages"
    cp "$0" "$last/bin/python"
    ;;
  *"-m engine_agent join"*) cat >>"$READ" ;;
esac
"""


def test_the_token_goes_to_curl_and_to_the_agent_by_standard_input_alone(tmp_path: Path) -> None:
    programs, home = tmp_path / "programs", tmp_path / "home"
    programs.mkdir()
    for name in ("curl", "python3.14"):
        (programs / name).write_text(PROGRAM)
        (programs / name).chmod(0o755)
    archives = [SimpleNamespace(tag="cp311-test", digest=DIGEST)]
    script = str(render_to_string("join.sh", {"server": "https://10.0.0.1:8443", "pin": "", "archives": archives}))
    told, read = tmp_path / "told", tmp_path / "read"
    # The script takes away what it fetched, which nobody did here.
    script = script.replace('rm "$STAGE/agent.tar.gz"', 'rm -f "$STAGE/agent.tar.gz"')
    ended = subprocess.run(
        ["sh", "-s", "--", TOKEN, "--port", "9000"],
        input=script,
        text=True,
        env={
            "PATH": f"{programs}:{os.environ['PATH']}",
            "SWITCHYARD_PREFIX": str(home),
            "TOLD": str(told),
            "READ": str(read),
        },
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
    assert "-m engine_agent join" in told.read_text()
    assert "--port 9000" in told.read_text()
    assert TOKEN not in told.read_text()
    assert read.read_text().count(TOKEN) == 2
