"""Runs the machine agent now and after a reboot: a unit if systemd runs and this process is root, otherwise a
supervising shell, and a line of cron if there is cron."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

from engine_agent.node import procfs
from engine_agent.node.journal import write_durably
from engine_agent.node.lock import read_holder
from engine_agent.node.logs import last_lines
from engine_agent.node.machine.paths import ROOT_CODE, HostPaths

LEFT = 3
"""Exit status of a machine agent that has left: it is not restarted."""
CHANGES_RELEASE = 4
"""Exit status of one that has switched to another release. It is restarted, as after every other status."""
UNIT = "switchyard-machine.service"
UNIT_FILE = Path("/etc/systemd/system") / UNIT
COMMAND_LIMIT_S = 30.0
END_LIMIT_S = 10.0
_UNIT = """[Unit]
Description=Switchyard machine agent
After=network-online.target
Wants=network-online.target

[Service]
ExecStart=/bin/sh {code}/start
StandardOutput=append:{log}
StandardError=append:{log}
Restart=always
RestartSec=2
RestartPreventExitStatus={left}
KillMode=process
LimitNOFILE=1048576

[Install]
WantedBy=multi-user.target
"""
_SUPERVISOR = """#!/bin/sh
# Runs the machine agent, and again when it ends, until it has left.
while [ -e '{current}' ]; do
  sh '{code}/start' >>'{log}' 2>&1
  [ $? -eq {left} ] && exit 0
  sleep 2
done
"""
TRIAL_STARTS, TRIAL_LIMIT_S = 3, 90
"""A new release must confirm itself within this many starts, and this many seconds after each."""
_START = """#!/bin/sh
# Starts the machine agent of the current release. If a release on trial does not confirm itself in time, goes back.
CODE='{code}'

go_back() {{
  before=$(head -n 1 "$CODE/trial")
  if [ -d "$before" ]; then
    ln -sfn "$before" "$CODE/.current.back"
    mv -fT "$CODE/.current.back" "$CODE/current" 2>/dev/null || ln -sfn "$before" "$CODE/current"
    rm -f "$CODE/.current.back"
  fi
  mv -f "$CODE/trial" "$CODE/went-back"
  rm -f "$CODE/trial-tries"
}}

watch() {{
  sleep {limit_s}
  [ "$(cat "$CODE/trial" 2>/dev/null)" = "$1" ] || exit 0
  go_back
  agent=$(cat "$CODE/agent.pid")
  if tr '\\0' ' ' <"/proc/$agent/cmdline" 2>/dev/null | grep -q 'engine_agent machine'; then kill -9 "$agent"; fi
}}

cd /  # Python imports from the working folder first
echo "$$" >"$CODE/agent.pid"
if [ -e "$CODE/trial" ]; then
  echo started >>"$CODE/trial-tries"
  trial=$(cat "$CODE/trial")  # before the fork: the agent may confirm itself before a background shell reads the file
  if [ "$(wc -l <"$CODE/trial-tries")" -gt {starts} ]; then go_back
  else watch "$trial" >/dev/null 2>&1 &
  fi
fi
exec "$(readlink -f "$CODE/current")/venv/bin/python" -m engine_agent machine --code "$CODE"
"""


class ServiceError(Exception):
    pass


def start(paths: HostPaths) -> str:
    """Starts the agent, now and at each boot. Returns a message for the owner, or "". Raises ServiceError if systemd or
    the shell failed. Raises OSError if a file cannot be written."""
    fields = {"code": paths.code, "log": paths.log, "current": paths.current, "left": LEFT}
    for private in (paths.log, paths.state / "supervisor.pid"):  # a shell or systemd would make them readable to all
        private.touch(mode=0o600)
        private.chmod(0o600)
    write_start(paths)
    if Path("/run/systemd/system").is_dir() and os.geteuid() == 0 and paths.code == ROOT_CODE:
        UNIT_FILE.write_text(_UNIT.format(**fields), encoding="utf-8")
        _command("systemctl", "daemon-reload")
        _command("systemctl", "enable", "--now", UNIT)
        return ""
    script = paths.code / "run"
    script.write_text(_SUPERVISOR.format(**fields), encoding="utf-8")
    script.chmod(0o755)
    supervisor = subprocess.Popen(
        ["sh", str(script)],
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    (paths.state / "supervisor.pid").write_text(f"{supervisor.pid}\n", encoding="ascii")
    return _at_boot(script)


def write_start(paths: HostPaths, *, limit_s: float = TRIAL_LIMIT_S) -> None:
    """Replaces the start script by the one of this release. A shell that reads the old script is not affected. Raises
    OSError if the disk failed; the old script stays."""
    text = _START.format(code=paths.code, limit_s=limit_s, starts=TRIAL_STARTS)
    script = paths.code / "start"
    if not script.exists() or script.read_text(encoding="utf-8") != text:
        write_durably(script, text.encode(), mode=0o755)


def _at_boot(script: Path) -> str:
    if shutil.which("crontab") is None:
        return f"switchyard: without systemd and cron it does not start after a reboot; run `{script} &` at boot"
    kept = [line for line in _crontab() if str(script) not in line]
    _write_crontab([*kept, f"@reboot {script}"])
    return ""


def stop(paths: HostPaths) -> None:
    script = paths.code / "run"
    if UNIT_FILE.exists() and paths.code == ROOT_CODE:
        with contextlib.suppress(ServiceError):
            _command("systemctl", "disable", "--now", UNIT)
        UNIT_FILE.unlink(missing_ok=True)
        with contextlib.suppress(ServiceError):
            _command("systemctl", "daemon-reload")
    with contextlib.suppress(OSError, ValueError):
        supervisor = int((paths.state / "supervisor.pid").read_text(encoding="ascii"))
        if str(script) in procfs.command(supervisor):
            os.kill(supervisor, signal.SIGKILL)
    if shutil.which("crontab") and any(str(script) in line for line in _crontab()):
        with contextlib.suppress(ServiceError):
            _write_crontab([line for line in _crontab() if str(script) not in line])
    holder = read_holder(paths.home)
    if holder is not None and holder.is_alive() and holder.pid != os.getpid():
        _stop_process(holder.pid)


def last_line(paths: HostPaths) -> str:
    return (last_lines(paths.log, 1) or ["it wrote nothing"])[0]


def _stop_process(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + END_LIMIT_S
        while procfs.stat(pid) is not None:
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                return
            time.sleep(0.1)


def _crontab() -> list[str]:
    done = subprocess.run(["crontab", "-l"], capture_output=True, text=True, timeout=COMMAND_LIMIT_S, check=False)
    return done.stdout.splitlines() if done.returncode == 0 else []


def _write_crontab(lines: list[str]) -> None:
    _command("crontab", "-", stdin="".join(f"{line}\n" for line in lines))


def _command(*argv: str, stdin: str = "") -> None:
    try:
        done = subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=COMMAND_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ServiceError(f"`{' '.join(argv)}` failed: {error}") from None
    if done.returncode:
        raise ServiceError(f"`{' '.join(argv)}` failed: {done.stderr.strip()[-300:]}")
