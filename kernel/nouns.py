"""Finds the modules of one layer in all nouns of an app, so that no list has to name a new noun: its tables and routes
are found where they are declared. Imports what it finds and decides nothing."""

from importlib import import_module
from pathlib import Path
from types import ModuleType


def noun_modules(app: str, layer: str) -> list[ModuleType]:
    """Imports `NOUN/layer.py` and the files in `NOUN/layer/` of every noun, or in `layer/` of an app without nouns."""
    root = Path(import_module(app).__path__[0])
    found = [path for form in (f"*/{layer}.py", f"*/{layer}/*.py", f"{layer}/*.py") for path in root.glob(form)]
    return [import_module(".".join((app, *path.relative_to(root).with_suffix("").parts))) for path in sorted(found)]
