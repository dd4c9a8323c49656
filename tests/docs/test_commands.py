"""Every target of make, management command and command of `switchyard` that documentation names exists, and every one
that exists is named."""

import re
from collections.abc import Iterator
from typing import Any

import typer

from controlplane.cli.main import app
from controlplane.cli.schema import entries_of
from tests.controlplane.api.client import document
from tests.docs.pages import ROOT, code_of, operators_pages, our_markdown, text_of

DJANGOS = {"migrate", "check", "shell", "makemigrations"}
TARGETS = set(re.findall(r"^([a-z-]+):", text_of("Makefile"), re.MULTILINE))
SHOWN_TARGETS = set(re.findall(r"^([a-z-]+):.*## ", text_of("Makefile"), re.MULTILINE))
MANAGEMENT = {
    path.stem
    for folder in ("accounts", "audit", "controlplane", "fleet", "models_registry", "traffic")
    for path in (ROOT / folder).glob("management/commands/[a-z]*.py")
}
PLACES = [page for page in our_markdown() if page.relative_to(ROOT).parts[0] != "tests"]


def commands(command: Any, before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yields ("rollout", "start") and all other commands, without the groups."""
    inner = getattr(command, "commands", None)
    if inner is None:
        yield before
        return
    for name, each in inner.items():
        yield from commands(each, (*before, name))


CLI = set(commands(typer.main.get_command(app)))


def named(pattern: str) -> dict[str, str]:
    """Returns each match in code of any page, with its page."""
    return {
        found: str(page.relative_to(ROOT))
        for page in PLACES
        for line in code_of(page)
        for found in re.findall(pattern, line)
    }


def test_every_named_target_of_make_exists() -> None:
    gone = {name: page for name, page in named(r"(?:^|[\s;])make ([a-z][a-z-]*)").items() if name not in TARGETS}
    assert not gone, f"the Makefile has no such target: {gone}"


def test_every_target_of_make_is_named() -> None:
    missing = [target for target in sorted(SHOWN_TARGETS) if f"make {target}" not in operators_pages()]
    assert SHOWN_TARGETS
    assert not missing, f"say in docs/operate what `make` does with these: {missing}"


def test_every_named_management_command_exists() -> None:
    gone = {name: page for name, page in named(r"manage\.py ([a-z_]+)").items() if name not in MANAGEMENT | DJANGOS}
    assert not gone, f"there is no such management command: {gone}"


def test_every_management_command_is_named() -> None:
    missing = [command for command in sorted(MANAGEMENT) if f"manage.py {command}" not in operators_pages()]
    assert MANAGEMENT
    assert not missing, f"say in docs/operate what `manage.py` does with these: {missing}"


def test_every_named_command_of_switchyard_exists() -> None:
    words = named(r"^(?:\$ )?switchyard ([a-z-]+(?: [a-z-]+)?)")
    firsts = {command[0] for command in CLI} | {"create"}
    gone = {text: page for text, page in words.items() if text.split()[0] not in firsts}
    groups = {command[0] for command in CLI if len(command) > 1} | {"create"}
    of_lists = {("create", entry["names"][1]) for entry in entries_of(document()) if "fields" in entry} | {("create",)}
    known = CLI | of_lists
    gone |= {
        text: page for text, page in words.items() if text.split()[0] in groups and tuple(text.split()) not in known
    }
    assert not gone, f"`switchyard` has no such command: {gone}"


def test_every_command_of_switchyard_is_in_the_table() -> None:
    first_column = " ".join(re.findall(r"^\| (`.+?`) \|", text_of("docs/cli.md"), re.MULTILINE))
    commands_shown = {" ".join(command): {f"`{' '.join(command)}`", f"`{command[-1]}`"} for command in sorted(CLI)}
    missing = [name for name, texts in commands_shown.items() if not any(text in first_column for text in texts)]
    assert CLI
    assert not missing, f"give each a row in docs/cli.md, Commands: {missing}"
