"""The operators' pages name every variable that our code reads, every process that production needs, every runbook."""

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from controlplane.embedded import control_plane
from controlplane.embedded.configuration import read_configuration
from controlplane.embedded.state_directory import StateDirectory
from controlplane.embedded.supervisor import Service
from tests.docs.pages import ROOT, operators_pages, section, text_of

PACKAGES = (
    "accounts",
    "audit",
    "controlplane",
    "engine_agent",
    "fleet",
    "kernel",
    "models_registry",
    "simulator",
    "traffic",
)
OURS = re.compile(r"(?:SWITCHYARD|OTEL)_[A-Z_]+|DATABASE_URL|REDIS_URL|WAIT_S|DETACH")
QUOTED = re.compile(rf'"({OURS.pattern})"')
OF_TESTS = {"SWITCHYARD_SCREENS", "SWITCHYARD_SCHEMA_EXAMPLES"}
RUNBOOKS = ROOT / "docs/runbooks"


def variables() -> Iterator[str]:
    """Names of variables that stand in our code as whole texts."""
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            yield from QUOTED.findall(text_of(path))


IN_SHELL = {
    name
    for path in ("templates/join.sh", "deploy/images/agent.sh")
    for name in re.findall(r"\$\{?(SWITCHYARD_[A-Z_]+)", text_of(path))
}
READ = {
    *variables(),
    "ENGINE",
    *IN_SHELL,
    *re.findall(r"\$\((?:or \$\()?(DETACH|TESTS|PYTHON|FAST)\)", text_of("Makefile")),
}


def services() -> list[Service]:
    """What `make up` keeps running for the control plane: every function there that makes a service."""
    made: list[Callable[..., Service]] = [
        function
        for _, function in inspect.getmembers(control_plane, inspect.isfunction)
        if inspect.signature(function).return_annotation is Service and not function.__name__.startswith("_")
    ]
    given = {"configuration": read_configuration({}), "home": StateDirectory(Path("/nowhere")), "environment": {}}
    return [function(**{name: given[name] for name in inspect.signature(function).parameters}) for function in made]


SERVICES = {service.name: service for service in services()}


def test_every_variable_is_explained() -> None:
    missing = [variable for variable in sorted(READ) if f"`{variable}`" not in text_of("docs/operations.md")]
    assert not missing, f"explain in docs/operations.md, Variables: {missing}"


def test_every_explained_variable_is_read() -> None:
    explained = set(OURS.findall(operators_pages()))
    gone = {name for name in explained - READ - OF_TESTS if not name.endswith("_")}
    assert not gone, f"nothing reads {sorted(gone)}: take it out of the docs"


def test_there_are_the_processes_that_everybody_knows() -> None:
    assert {"web", "controller", "worker", "beat", "batch", "planner", "sender"} <= set(SERVICES)


@pytest.mark.parametrize("name", SERVICES)
def test_production_names_every_process_with_its_command(name: str) -> None:
    production = section("docs/operations.md", "## Production")
    program = SERVICES[name].program.arguments
    command = [word for word in program if not word.startswith(("-", "/", "ignore:"))][:1]
    ending = {
        "web": "-m controlplane.web",
        "beat": "beat",
        **{worker: f"worker --hostname {worker}@%h" for worker in ("controller", "worker", "planner")},
    }.get(name, f"manage.py {name}")
    assert f"`{name}`" in production, f"docs/operations.md, Production, does not name the process {name}"
    assert all(word in production for word in (*command, ending)), f"give the command of {name} in Production"
    assert f"| {name} " in section("docs/architecture.md", "## Processes"), f"give {name} a row in architecture.md"


def test_every_runbook_is_in_the_index() -> None:
    listed = set(re.findall(r"\]\(([\w-]+\.md)\)", text_of("docs/runbooks/README.md")))
    assert listed == {path.name for path in RUNBOOKS.glob("*.md")} - {"README.md"}
