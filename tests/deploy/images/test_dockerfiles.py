"""The Dockerfiles say what exists, carry all that the control plane imports, no secret and nothing else of us.

Built and started they are by `make images-check`, which takes minutes.
"""

import re
import subprocess
from pathlib import Path

import pytest

from controlplane.embedded.configuration import CHECKOUT
from tests.docs.test_operations import PACKAGES

IMAGES = CHECKOUT / "deploy/images"
NAMES = ("control-plane", "node-agent", "ingress")
KNOWN = frozenset(
    {
        "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "LABEL", "RUN", "STOPSIGNAL", "USER", "VOLUME",
        "WORKDIR",
    }
)  # fmt: skip


def instructions(name: str) -> list[tuple[str, str]]:
    """Of a Dockerfile, with lines joined and without comments."""
    text = re.sub(r"^#.*\n", "", (IMAGES / f"{name}.Dockerfile").read_text(), flags=re.MULTILINE)
    lines = filter(None, text.replace("\\\n", " ").splitlines())
    return [(line.partition(" ")[0], line.partition(" ")[2].strip()) for line in lines]


def copied(name: str) -> list[str]:
    words = [rest.split() for word, rest in instructions(name) if word == "COPY" and not rest.startswith("--from")]
    return [source for each in words for source in each[:-1]]


@pytest.mark.parametrize("name", NAMES)
def test_each_is_made_of_what_there_is_from_one_base(name: str) -> None:
    words = instructions(name)
    assert {word for word, _ in words} <= KNOWN
    assert words[0] == ("ARG", "BASE=docker.io/library/python:3.12-slim-bookworm")
    assert {rest.partition(" ")[0] for word, rest in words if word == "FROM"} == {"${BASE}"}
    missing = [source for source in copied(name) if not (CHECKOUT / source).exists()]
    assert not missing, missing
    shown = [line[1:] for line in (CHECKOUT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    hidden = [
        source for source in copied(name) if not any(source == one or source.startswith(f"{one}/") for one in shown)
    ]
    assert not hidden, "the builder does not see it"


def test_the_control_plane_has_every_package_of_ours_and_no_root() -> None:
    assert set(PACKAGES) <= set(copied("control-plane"))
    assert "templates" in copied("control-plane")
    assert [rest for word, rest in instructions("control-plane") if word == "USER"] == ["60800:60800"]


@pytest.mark.parametrize("name", NAMES)
def test_no_image_carries_a_secret(name: str) -> None:
    said = " ".join(rest for word, rest in instructions(name) if word in {"ENV", "ARG"})
    assert not re.search(r"SECRET|PASSWORD|TOKEN|INVITATION|DATABASE_URL|\w+_KEY", said)


@pytest.mark.parametrize(
    ("script", "name"), [("control-plane.sh", "control-plane"), ("agent.sh", "node-agent"), ("agent.sh", "ingress")]
)
def test_what_it_starts_is_a_script_that_the_shell_takes(script: str, name: str) -> None:
    [entry] = [rest for word, rest in instructions(name) if word == "ENTRYPOINT"]
    assert (
        f"COPY deploy/images/{script} {entry.strip('[]').strip(chr(34))}" in (IMAGES / f"{name}.Dockerfile").read_text()
    )
    assert subprocess.run(["sh", "-n", str(IMAGES / script)], capture_output=True, check=False).stderr == b""


def test_engines_of_the_image_are_linked_and_never_replace_installed_ones(tmp_path: Path) -> None:
    engines, cache = tmp_path / "image/engines", tmp_path / "state/cache/engines"
    for folder in (engines / "vllm", engines / "llama-cpp", cache / "llama-cpp"):
        folder.mkdir(parents=True)
    (cache / "vllm").symlink_to("/opt/of-an-earlier-image")
    environment = {
        "PATH": "/usr/bin:/bin", "SWITCHYARD_PREFIX": str(tmp_path), "SWITCHYARD_IMAGE_ENGINES": str(tmp_path / "image")
    }  # fmt: skip
    subprocess.run(["sh", str(IMAGES / "agent.sh"), "node"], env=environment, capture_output=True, check=False)
    assert (cache / "vllm").resolve() == engines / "vllm"
    assert not (cache / "llama-cpp").is_symlink()


def test_each_engine_that_an_image_can_have_has_an_installer() -> None:
    [run] = [rest for word, rest in instructions("node-agent") if word == "RUN" and "ENGINE" in rest]
    assert '"engine_agent.engines.$ENGINE.environment" install' in run
    stated = re.findall(r"ENGINE=(\w+)", (IMAGES / "node-agent.Dockerfile").read_text())
    assert set(stated) == {"vllm", "llama_cpp"}
    assert all((CHECKOUT / f"engine_agent/engines/{name}/environment.py").exists() for name in stated)


@pytest.mark.parametrize("role", ["node", "ingress"])
def test_a_host_that_was_not_invited_says_what_it_lacks(tmp_path: Path, role: str) -> None:
    def started(*arguments: str, **more: str) -> tuple[int, str]:
        environment = {"PATH": "/usr/bin:/bin", "SWITCHYARD_PREFIX": str(tmp_path), **more}
        done = subprocess.run(
            ["sh", str(IMAGES / "agent.sh"), *arguments],
            env=environment, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        return done.returncode, done.stderr

    code, said = started(role)
    assert (code, "lacks SWITCHYARD_SERVER, SWITCHYARD_PIN, SWITCHYARD_INVITATION: run" in said) == (64, True), said
    token = tmp_path / "token"
    token.write_text("sw_0\n")
    code, said = started(role, SWITCHYARD_SERVER="https://127.0.0.1:9", SWITCHYARD_INVITATION_FILE=str(token))
    assert (code, f"this {role} has not joined a fleet, and lacks SWITCHYARD_PIN: run" in said) == (64, True), said
    server = {
        "SWITCHYARD_SERVER": "https://127.0.0.1:9",
        "SWITCHYARD_PIN": "sha256//x",
        "SWITCHYARD_INVITATION": "sw_0",
    }
    code, said = started(role, **server)
    assert (code, "the control plane at https://127.0.0.1:9 does not answer" in said) == (1, True), said
    assert started("spare")[0] == 64
