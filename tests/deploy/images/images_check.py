"""The images are built without a daemon, from a base that is made here, and what is in them starts: the control plane
answers over a database that its URL names, a node and an ingress join it and serve."""

import contextlib
import json
import os
import re
import secrets
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import httpx
import psutil
import pytest

from controlplane.embedded.configuration import CHECKOUT
from controlplane.processes import BY_NAME
from engine_agent.engines.uv_install import read_pip_settings
from lab.embedded_servers import EmbeddedServers
from tests.deploy.images.by_tcp import by_tcp
from tests.ports import free_ingress_port, free_ports

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1800)]

IMAGES = CHECKOUT / "deploy/images"
WITHIN_S = 900.0
STOPS_WITHIN_S = 60.0
REGION = "us-east-1"
LINE = re.compile(r"--pinnedpubkey '(sha256//[^']+)' (https://[^ ]+)/join \| sh -s -- (\S+)")
OF_PIP = {
    "index-url": "PIP_INDEX_URL",
    "extra-index-url": "PIP_EXTRA_INDEX_URL",
    "find-links": "PIP_FIND_LINKS",
    "cert": "PIP_CERT",
}
"""Arguments of the build for this computer's package mirror."""


class Builder:
    """Runs `make images-base`, `make images` and buildah with a store below `folder`."""

    def __init__(self, folder: Path) -> None:
        store = folder / "storage.conf"
        store.write_text(
            f'[storage]\ndriver = "overlay"\ngraphroot = "{folder / "store"}"\nrunroot = "{folder / "run"}"\n'
        )
        self._environment = {**os.environ, "CONTAINERS_STORAGE_CONF": str(store)}

    def do(self, *command: str) -> str:
        """What it says; it must succeed."""
        done = subprocess.run(
            command,
            cwd=CHECKOUT, env=self._environment, capture_output=True, text=True, timeout=WITHIN_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-3000:]}"
        return done.stdout.strip()

    def build(self) -> None:
        self.do("make", "images-base")
        self.do("make", "images", "BASE=localhost/switchyard/base", f"OPTIONS={shlex.join(self._of_the_mirror())}")

    def _of_the_mirror(self) -> list[str]:
        """Returns the arguments that give the build this computer's pip sources, including local files."""
        settings = {OF_PIP[key]: value for key, value in read_pip_settings().items() if key in OF_PIP}
        parts = [part for value in settings.values() for part in value.split()]
        # An index names files beside itself.
        places = {str(Path(part.removeprefix("file://")).parent) if "://" in part else part for part in parts}
        shown = [
            f"--volume={place}:{place}:ro" for place in sorted(places) if place.startswith("/") and Path(place).exists()
        ]
        return [*(f"--build-arg={key}={value}" for key, value in settings.items()), *shown]

    def started_from(self, name: str) -> "Container":
        image = f"localhost/switchyard/{name}"
        made = self.do("buildah", "from", "--pull-never", image)
        config = json.loads(self.do("buildah", "inspect", "--type", "image", image))["OCIv1"]["config"]
        return Container(Path(self.do("buildah", "mount", made)), config)


class Container:
    """The file tree of one, and how its image says that it is run."""

    def __init__(self, root: Path, config: dict[str, Any]) -> None:
        self.root, self.config = root, config
        self._processes: list[subprocess.Popen[bytes]] = []

    def command(self, *arguments: str) -> list[str]:
        """Runs in separate namespaces, except the network; the kernel kills all of it with the first process."""
        uid, _, gid = self.config.get("User", "0:0").partition(":")
        self.root.joinpath("proc").mkdir(exist_ok=True)
        mounted = ["unshare", "--mount", "sh", "-c", 'mount --rbind /dev "$0/dev" && exec "$@"', str(self.root)]
        return [
            *mounted, "unshare", "--fork", "--pid", "--mount", "--ipc", "--uts", "--kill-child", f"--root={self.root}",
            "--mount-proc", f"--wd={self.config.get('WorkingDir') or '/'}",
            f"--setgid={gid or uid or 0}", f"--setuid={uid or 0}",
            *self.config["Entrypoint"], *(arguments or self.config["Cmd"]),
        ]  # fmt: skip

    def environment(self, more: dict[str, str]) -> dict[str, str]:
        given = dict(line.split("=", 1) for line in self.config.get("Env", []))
        return {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", **given, **more}

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments),
            env=self.environment(environment), capture_output=True, text=True, timeout=WITHIN_S, check=False,
        )  # fmt: skip

    def start(self, log: Path, *arguments: str, **environment: str) -> None:
        with log.open("wb") as output:
            process = subprocess.Popen(
                self.command(*arguments), env=self.environment(environment), stdout=output, stderr=subprocess.STDOUT
            )
        self._processes.append(process)

    def stop(self) -> int:
        """As a runtime stops a container, by a signal to its first process; returns its exit status."""
        [process] = self._processes
        [first] = psutil.Process(process.pid).children()
        first.terminate()
        return process.wait(STOPS_WITHIN_S)

    def runs(self) -> bool:
        """Whether what was started has not ended."""
        return all(process.poll() is None for process in self._processes)

    def forget(self) -> None:
        self._processes.clear()

    def end(self) -> None:
        """By its first process, with which the kernel ends all of it: --kill-child does not survive --setuid."""
        for process in self._processes:
            for first in psutil.Process(process.pid).children() if process.poll() is None else ():
                first.kill()
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    folder = tmp_path_factory.mktemp("images")
    made = Builder(folder)
    try:
        made.build()
        yield made
    finally:
        made.do("buildah", "unmount", "--all")
        made.do("buildah", "rm", "--all")
        shutil.rmtree(folder, ignore_errors=True)


def eventually(find: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + WITHIN_S
    last: Any = None
    while time.monotonic() < deadline:
        try:
            if last := find():
                return last
        except (httpx.HTTPError, AssertionError, ValueError) as error:
            last = error
        time.sleep(0.5)  # between two looks
    raise AssertionError(f"{what}: {last!r}")


class ControlPlane:
    """All its processes, each in a container of one image. `servers`: variables for the database and Valkey."""

    def __init__(self, containers: dict[str, Container], servers: dict[str, str], logs: Path) -> None:
        self._containers, self._logs = containers, logs
        self._web = containers["web"]
        self.port = free_ports(2)
        self.agent_port = self.port + 1
        self.environment = {
            **servers,
            "SWITCHYARD_SECRET_KEY": secrets.token_hex(32),
            "SWITCHYARD_PORT": str(self.port),
            "SWITCHYARD_AGENT_PORT": str(self.agent_port),
            "SWITCHYARD_AGENT_URL": f"https://127.0.0.1:{self.agent_port}",
        }
        self._token = ""

    def start(self) -> None:
        for command in (
            ("migrate", "--no-input"),
            (
                "ensure_operator",
                "--password-env",
                "PASSWORD",
                "--token-file",
                "/var/lib/switchyard-control/operator-token",
            ),
            ("seed_demo", "--engine", "sim", "--provider", "machines"),
        ):
            done = self._web.run("manage", *command, PASSWORD=secrets.token_hex(16), **self.environment)
            assert done.returncode == 0, f"{command}: {done.stdout[-1000:]}{done.stderr[-2000:]}"
        self._token = (self._web.root / "var/lib/switchyard-control/operator-token").read_text().strip()
        for process, container in self._containers.items():
            container.start(self._logs / f"{process}.log", process, **self.environment)

    def worker_answers(self) -> bool:
        asked = "from controlplane.celery import app; print(app.control.ping(timeout=10))"
        done = self._web.run("manage", "shell", "--no-imports", "-c", asked, **self.environment)
        return "'ok': 'pong'" in done.stdout

    def ended(self) -> list[str]:
        """Processes that are not there any more; what they said is in their logs."""
        return [process for process, container in self._containers.items() if not container.runs()]

    def get(self, path: str) -> Any:
        answer = httpx.get(f"http://127.0.0.1:{self.port}{path}", headers=self._headers, timeout=30)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def invitation(self, role: str) -> dict[str, str]:
        url = f"http://127.0.0.1:{self.port}/api/v1/machines/invitations/"
        body = {
            "region": REGION,
            "count": 1,
            "role": role,
            **({"instance_type": "local.cpu"} if role == "node" else {}),
        }
        answer = httpx.post(url, json=body, headers=self._headers, timeout=30)
        found = LINE.search(answer.json().get("line", ""))
        assert found, answer.text
        return dict(zip(("SWITCHYARD_PIN", "SWITCHYARD_SERVER", "SWITCHYARD_INVITATION"), found.groups(), strict=True))

    @property
    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._token}"}


@pytest.fixture(scope="module")
def control(builder: Builder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    folder = tmp_path_factory.mktemp("control")
    servers = EmbeddedServers(folder / "servers")
    containers = {process: builder.started_from("control-plane") for process in BY_NAME}
    try:
        with reached(servers.start()) as urls:
            try:
                made = ControlPlane(containers, urls, folder)
                made.start()
                eventually(lambda: made.get("/healthz"), "web answers")
                yield made
            finally:
                for container in containers.values():
                    container.end()
    finally:
        servers.stop()


@contextlib.contextmanager
def reached(servers: dict[str, str]) -> Iterator[dict[str, str]]:
    """The URLs of servers on unix sockets, by TCP."""
    database, redis = urlsplit(servers["database_url"]), urlsplit(servers["redis_url"])
    folder = unquote(database.hostname or "")
    with by_tcp(f"{folder}/.s.PGSQL.5432", redis.path) as (port, redis_port):
        yield {
            "DATABASE_URL": f"postgres://{database.username}@127.0.0.1:{port}{database.path}",
            "REDIS_URL": f"redis://127.0.0.1:{redis_port}/0",
        }


@pytest.fixture
def agent(builder: Builder) -> Iterator[Callable[[str], Container]]:
    """A container of an image; it ends with the test."""
    made: list[Container] = []

    def start(image: str) -> Container:
        made.append(builder.started_from(image))
        return made[-1]

    yield start
    for container in made:
        container.end()


def test_the_control_plane_answers_and_runs_as_nobody_else(control: ControlPlane) -> None:
    eventually(lambda: control.get("/healthz")["status"] == "ok", "its loops are in time")
    assert control.get("/api/v1/regions/")["results"]


def test_each_of_its_processes_runs_in_a_container_of_its_own(control: ControlPlane) -> None:
    eventually(control.worker_answers, "the worker answers")
    assert not control.ended()


def test_what_is_no_process_of_it_is_refused(builder: Builder) -> None:
    container = builder.started_from("control-plane")
    done = container.run("shell")
    assert (done.returncode, "'shell' is no process of the control plane" in done.stderr) == (64, True), done
    assert "SWITCHYARD_SECRET_KEY" in container.run("web").stderr, "it says what it lacks"


@pytest.mark.parametrize(("image", "role"), [("node-agent", "node"), ("ingress", "ingress")])
def test_a_host_that_was_not_invited_says_what_it_lacks(
    agent: Callable[[str], Container], image: str, role: str
) -> None:
    done = agent(image).run(SWITCHYARD_SERVER="https://127.0.0.1:9")
    assert done.returncode == 64
    assert f"this {role} has not joined a fleet, and lacks SWITCHYARD_PIN, SWITCHYARD_INVITATION: run" in done.stderr


def test_a_node_joins_serves_and_comes_back(
    control: ControlPlane, agent: Callable[[str], Container], tmp_path: Path
) -> None:
    node = agent("node-agent")
    node.start(tmp_path / "first.log", **control.invitation("node"), SWITCHYARD_FIRST_PORT=str(free_ports(20)))

    def spares() -> list[str]:
        rows = control.get(f"/api/v1/nodes/?region={REGION}")["results"]
        return [row["id"] for row in rows if row["state"] == "ready" and row["connected"]]

    [joined] = eventually(spares, f"a node joins: {tmp_path / 'first.log'}")
    assert node.stop() == 0
    eventually(lambda: not spares(), "it is gone")
    node.forget()
    node.start(tmp_path / "second.log")
    assert eventually(spares, "it comes back without an invitation") == [joined]


def test_an_ingress_joins_and_has_haproxy_serve(
    control: ControlPlane, agent: Callable[[str], Container], tmp_path: Path
) -> None:
    ingress = agent("ingress")
    first = free_ingress_port()
    ingress.start(tmp_path / "log", **control.invitation("ingress"), SWITCHYARD_FIRST_PORT=str(first))

    def models() -> httpx.Response:
        return httpx.get(f"http://127.0.0.1:{first}/v1/models", timeout=10)

    eventually(lambda: models().status_code in {200, 401}, "HAProxy answers by its table")
    assert ingress.stop() == 0
    with pytest.raises(httpx.ConnectError):
        models()
