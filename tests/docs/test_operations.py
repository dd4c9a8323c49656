"""The operators' pages name every variable that the code reads, every process for production, and every runbook."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from controlplane.processes import BY_NAME, PROCESSES
from tests.docs.pages import FENCED, ROOT, operators_pages, section, text_of
from tests.docs.test_links import slug
from tests.docs.variables_page import LINKS, SETTINGS, Row, rows, with_table

CONFIGURE = "docs/operate/configure.md"

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
RUNBOOKS = ROOT / "docs/runbooks"
PAGES = sorted(page.relative_to(ROOT).as_posix() for page in (ROOT / "docs/operate").glob("[a-z]*.md"))
BETWEEN_PROCESSES = {
    "SWITCHYARD_BATCH_PROMPT_TOKENS",
    "SWITCHYARD_CELL_CERTIFICATE",
    "SWITCHYARD_CELL_MEMBER",
    "SWITCHYARD_CELL_SECRET",
    "SWITCHYARD_CLOUD",
    "SWITCHYARD_FINGERPRINT",
    "SWITCHYARD_GATE",
    "SWITCHYARD_JOIN_TOKEN",
    "SWITCHYARD_KV_EVENTS",
    "SWITCHYARD_LAUNCHED_FROM",
    "SWITCHYARD_DEVICES",
    "SWITCHYARD_NODE_ID",
    "SWITCHYARD_OPERATOR_PASSWORD",
    "SWITCHYARD_ORDER",
    "SWITCHYARD_PLAIN_LINKS",
    "SWITCHYARD_PROCESS",
    "SWITCHYARD_VLLM_SLEEP",
}
"""Set by launchers, agents, tests and measurements. Operators never set them, so the tables leave them out."""


def variables() -> Iterator[str]:
    """Yields the names of variables that the code contains as string literals."""
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


def test_every_variable_is_explained() -> None:
    tables = section(CONFIGURE, "## Variables")
    missing = [variable for variable in sorted(READ - BETWEEN_PROCESSES) if f"`{variable}`" not in tables]
    assert not missing, f"explain in {CONFIGURE}, Variables: {missing}"


def test_variables_between_processes_are_read_and_not_in_the_tables() -> None:
    assert not BETWEEN_PROCESSES - READ, "nothing reads them: take them out of this list"
    assert not BETWEEN_PROCESSES & set(OURS.findall(text_of(CONFIGURE)))


def test_every_explained_variable_is_read() -> None:
    explained = set(OURS.findall(operators_pages()))
    gone = {name for name in explained - READ if not name.endswith("_")}
    assert not gone, f"nothing reads {sorted(gone)}: take it out of the docs"


def test_the_table_of_variables_is_what_the_settings_state() -> None:
    written = with_table(text_of(CONFIGURE), text_of(SETTINGS.relative_to(ROOT)))
    assert text_of(CONFIGURE) == written, "run python -m tests.docs.variables_page"


def test_every_variable_of_the_settings_has_a_row() -> None:
    source = text_of(SETTINGS.relative_to(ROOT))
    names = [row.name for row in rows(source)]
    assert len(names) == len(set(names))
    assert set(QUOTED.findall(source)) <= set(names)
    assert set(LINKS) <= set(names)


def test_a_setting_without_a_docstring_is_refused() -> None:
    with pytest.raises(ValueError, match="SWITCHYARD_URL"):
        list(rows('URL = os.environ.get("SWITCHYARD_URL", "")\nPORT = 1'))


def test_a_row_has_the_default_of_the_code_or_of_the_docstring() -> None:
    made = rows(
        'A = _flag("SWITCHYARD_A", True)\n"""One."""\n'
        'B = os.environ.get("SWITCHYARD_B") or C\n"""Two,\nthree. Default: `C`"""\n'
        'D = d(os.environ)\n"""`SWITCHYARD_D`: four. Default: five"""\n'
    )
    assert list(made) == [
        Row("SWITCHYARD_A", "`1`", "One."),
        Row("SWITCHYARD_B", "`C`", "Two, three."),
        Row("SWITCHYARD_D", "five", "Four."),
    ]


def test_a_page_without_a_place_for_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="begin variables"):
        with_table("# Configure", "")


def test_the_entry_lists_every_page() -> None:
    entry = text_of("docs/operate/README.md")
    assert PAGES
    assert not [page for page in PAGES if f"]({Path(page).name})" not in entry]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_begins_with_an_index_of_its_sections(page: str) -> None:
    beginning, *_ = text_of(page).partition("\n## ")
    sections = {slug(heading) for heading in re.findall(r"^## (.+)$", FENCED.sub("", text_of(page)), re.MULTILINE)}
    assert sections <= set(re.findall(r"\]\(#([\w-]+)\)", beginning))


def process_table() -> str:
    rows = [["process", "does", "how many", "needs", "health"], ["---"] * 5]
    rows += [[f"`{kind.role}`", kind.does, kind.how_many, kind.needs, kind.health] for kind in PROCESSES]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def test_the_table_of_processes_is_in_the_documents() -> None:
    assert process_table() in section("docs/operate/install.md", "## Production"), "copy process_table() of this file"


@pytest.mark.parametrize("name", BY_NAME)
def test_the_documents_name_every_process(name: str) -> None:
    assert f"-m controlplane.processes {name}" in section("docs/operate/install.md", "## Production")
    assert f"| {name} " in section("docs/architecture.md", "## Processes"), f"give {name} a row in architecture.md"


def test_every_runbook_is_in_the_index() -> None:
    listed = set(re.findall(r"\]\(([\w-]+\.md)\)", text_of("docs/runbooks/README.md")))
    assert listed == {path.name for path in RUNBOOKS.glob("*.md")} - {"README.md"}
