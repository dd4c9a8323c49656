"""docs/seeds.md lists every mechanism, number and system that the followed systems name, each with a known status, a
command that exists and a figure."""

import re
import shlex
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from bench.__main__ import benches
from tests.docs.pages import ROOT, text_of
from tests.docs.test_commands import CLI, TARGETS

PAGE = "docs/seeds.md"
STATUSES = {"real", "simulated", "rendered", "not built"}
SOURCES = {"A", "B", "C", "D"}
NAMED = (
    # numbers
    "80,000 chips", "3 million tokens a minute", "p99 first response within 1 s", "10,000 GPUs", "300 ms", "50 %",
    "20 to 40 %", "twice the tokens", "three regions", "billions of requests a day",
    # systems
    "ECS", "EFA", "Trainium", "Inferentia", "GPU", "vLLM", "SGLang", "TensorRT-LLM", "Triton", "Dynamo", "Kafka",
    "ElastiCache", "S3", "gRPC", "CloudWatch", "Java", "Load Balancer",
    # mechanisms
    "leader", "followers", "topology", "rolling updates", "replacement", "proxy", "outstanding", "cache-aware",
    "between regions", "arallel decoding", "tree", "prefill", "batch", "ear-real-time", "streaming",
    "ontinuous batching", "INT8", "query planner", "utoscaling", "sink",
)  # fmt: skip


class Row(NamedTuple):
    source: str
    mechanism: str
    status: str
    command: str
    figure: str


def rows() -> list[Row]:
    """The rows of all tables under a heading of the second level."""
    tables = text_of(PAGE).partition("\n## ")[2]
    cells = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in tables.splitlines() if line.startswith("| ")
    )
    return [Row(*each) for each in cells if each[0] not in ("source", "---")]


def unknown_commands(command: str) -> Iterator[str]:
    for text in re.findall(r"`([^`]+)`", command):
        match shlex.split(text):
            case ["make", target, *_]:
                known = target in TARGETS
            case ["switchyard", first, *rest]:
                known = (first,) in CLI or (first, *rest[:1]) in CLI
            case [".venv/bin/python", "-m", "bench", name, *_]:
                known = name in benches()
            case [".venv/bin/python", "-m", "pytest", *arguments]:
                paths = [each.partition("::")[0] for each in arguments if each.startswith("tests/")]
                known = bool(paths) and all((ROOT / path).exists() for path in paths)
            case _:
                known = False
        if not known:
            yield text


def test_every_row_has_source_status_command_and_figure() -> None:
    assert len(rows()) > 30
    for row in rows():
        assert row.source in SOURCES, row
        assert row.status in STATUSES, row
        assert row.figure, row
        assert row.status == "not built" or "`" in row.command, row


def test_every_command_exists() -> None:
    unknown = [text for row in rows() for text in unknown_commands(row.command)]
    assert not unknown


@pytest.mark.parametrize("name", NAMED)
def test_what_the_sources_name_has_a_row(name: str) -> None:
    assert any(name in row.mechanism for row in rows())


def test_each_status_is_explained() -> None:
    before_tables = text_of(PAGE).partition("\n## ")[0]
    assert set(re.findall(r"^\| ([a-z ]+) \|", before_tables, re.MULTILINE)) - {"status"} == STATUSES
