"""Prometheus's text format 0.0.4, as far as we need it. Pure formatting; names come whole."""

from collections.abc import Mapping

CONTENT_TYPE = b"text/plain; version=0.0.4"


def family(name: str, kind: str, text: str) -> list[str]:
    """The two lines before a family's samples."""
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]


def sample(name: str, labels: Mapping[str, str], value: float) -> str:
    text = ",".join(f'{key}="{_escaped(label)}"' for key, label in labels.items())
    return f"{name}{{{text}}} {value}"


def single(name: str, kind: str, text: str, labels: Mapping[str, str], value: float) -> list[str]:
    return [*family(name, kind, text), sample(name, labels, value)]


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
