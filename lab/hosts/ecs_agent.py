"""The ECS agent of a container instance in a laboratory, with a container runtime: it registers the machine with the
cluster of /etc/ecs/ecs.config, polls the cloud, and runs each task in the machine's network. A task has its own
processes, /var/lib, /tmp and /dev, where only the devices of its definition are. Its image is the machine's own file
system with the entrypoint of the agent's images (`deploy/images/agent.sh`), which is its PID 1. Tasks run on while the
cloud does not answer.

The program is copied to the machine, where nothing else of this repository is: it imports only the standard library.
"""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

CONFIGURATION = Path("/etc/ecs/ecs.config")
ENTRYPOINT = "/usr/local/bin/switchyard-agent"
TASKS, VOLUMES = Path("/srv/tasks"), Path("/srv/volumes")
"""The files of each task, and those of the machine that tasks mount: /mnt itself cannot be written here."""
PLAIN_DEVICES = ("full", "null", "random", "tty", "urandom", "zero")
POLL_S = 0.4
ANSWERS_WITHIN_S = 10.0
METADATA = "http://169.254.169.254/latest"
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def request(method: str, url: str, body: bytes | None = None, header: tuple[str, str] = ("Accept", "*/*")) -> bytes:
    asked = urllib.request.Request(url, body, dict([header]), method=method)  # noqa: S310 - of the cloud of tests
    with _OPENER.open(asked, timeout=ANSWERS_WITHIN_S) as answer:
        found: bytes = answer.read()
    return found


def command_cloud(what: str, **given: Any) -> Any:
    url = f"{os.environ['AWS_ENDPOINT_URL']}/cloud/{what}"
    return json.loads(request("POST", url, json.dumps(given).encode()))["done"]


def machine_id() -> str:
    token = request("PUT", f"{METADATA}/api/token", header=("X-aws-ec2-metadata-token-ttl-seconds", "60")).decode()
    return request("GET", f"{METADATA}/meta-data/instance-id", header=("X-aws-ec2-metadata-token", token)).decode()


def cluster_name() -> str:
    lines = CONFIGURATION.read_text().splitlines() if CONFIGURATION.exists() else []
    return next((line.partition("=")[2].strip() for line in lines if line.startswith("ECS_CLUSTER=")), "")


def script_of(order: dict[str, Any]) -> str:
    """Returns what the first process of a task does before it becomes the entrypoint."""
    home, role = TASKS / order["task"], "ingress" if "/ingress" in order["image"] else "node"
    lines = ["set -e", f"cd {home}", "mkdir -p var-lib dev", "mount -t tmpfs tmpfs dev", "mkdir dev/shm"]
    for path in (*(f"/dev/{name}" for name in PLAIN_DEVICES), *order["devices"]):
        place = path.removeprefix("/")
        lines += [f"mkdir -p $(dirname {place})", f": >{place}", f"mount --bind {path} {place}"]
    links = {"fd": "fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}
    lines += [f"ln -s /proc/self/{target} dev/{name}" for name, target in links.items()]
    lines += ["mount -t tmpfs tmpfs dev/shm", "mount -t tmpfs tmpfs /tmp", "mount -t tmpfs tmpfs /mnt"]
    for inside, source in order["mounts"].items():
        kept, place = f"{VOLUMES}{source}", f"{home}{inside}" if inside.startswith("/dev/") else inside
        lines += [f"mkdir -p {kept} {place}", f"mount --bind {kept} {place}"]
    lines += ["mount --bind var-lib /var/lib", "mount --rbind dev /dev", "mount -t proc proc /proc", "cd /"]
    stated = {**order["environment"], "SWITCHYARD_PREFIX": "/var/lib/switchyard"}
    stated["AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"] = order["keys"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in stated.items()]
    return "\n".join([*lines, f"exec {ENTRYPOINT} {role}", ""])


class Container:
    """One task that was started. `killed_at`: on the monotonic clock; None: it was not asked to stop."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._stop_timeout_s = float(order["stop_timeout_s"])
        self.killed_at: float | None = None
        home = TASKS / order["task"]
        home.mkdir(parents=True)
        script = home / "start.sh"
        script.write_text(script_of(order))
        as_root = [] if os.geteuid() == 0 else ["--map-root-user"]
        with (home / "log").open("ab") as log:
            self._process = subprocess.Popen(
                ["unshare", "--mount", "--pid", "--fork", "--kill-child", *as_root, "sh", str(script)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def state(self) -> dict[str, str]:
        status = self._process.poll()
        if status is None:
            return {"status": "RUNNING"}
        code = "UserInitiated" if self.killed_at is not None else "EssentialContainerExited"
        return {"status": "STOPPED", "code": code, "reason": f"Essential container in task exited ({status})"}

    def stop(self) -> None:
        """Asks its first process to end, and ends it once its time is over."""
        now = time.monotonic()
        if self.killed_at is None:
            self.killed_at = now + self._stop_timeout_s
            self._send(signal.SIGTERM)
        elif now > self.killed_at:
            self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        with contextlib.suppress(OSError):
            for child in children.read_text().split():
                os.kill(int(child), number)


class Agent:
    def __init__(self) -> None:
        self._containers: dict[str, Container] = {}
        self._ended: dict[str, dict[str, str]] = {}

    def poll(self, instance: str) -> None:
        states = {name: container.state() for name, container in self._containers.items()} | self._ended
        orders = command_cloud("agent", instance=instance, states=states)
        for order in orders:
            self._follow(order)
        wanted = {order["task"] for order in orders}
        for name in [name for name, said in states.items() if said["status"] == "STOPPED" and name not in wanted]:
            self._containers.pop(name, None)
            self._ended.pop(name, None)

    def _follow(self, order: dict[str, Any]) -> None:
        name = order["task"]
        container = self._containers.get(name)
        if container is not None:
            if order["status"] == "STOPPING":
                container.stop()
        elif order["status"] != "PENDING":
            self._ended[name] = {"status": "STOPPED", "reason": "Host was restarted"}
        elif not order["is_pulled"]:
            reason = f"CannotPullContainerError: failed to resolve ref {order['image']}: {order['image']}: not found"
            self._ended[name] = {"status": "STOPPED", "code": "TaskFailedToStart", "reason": reason}
        else:
            self._containers[name] = Container(order)


def main() -> None:
    """Runs until the machine ends."""
    agent, instance = Agent(), ""
    while True:
        try:
            if instance:
                agent.poll(instance)
            elif cluster := cluster_name():
                instance = command_cloud("register", cluster=cluster, machine=machine_id())
        except (OSError, ValueError, KeyError) as error:
            sys.stderr.write(f"ecs-agent: {error!r}\n")
        time.sleep(POLL_S)


if __name__ == "__main__":
    main()
