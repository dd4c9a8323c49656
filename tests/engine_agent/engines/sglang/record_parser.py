"""Records the options of SGLang's parser: `PYTHON tests/engine_agent/engines/sglang/record_parser.py WHEEL FOLDER`.

`PYTHON` is that of vLLM's environment, which has most of the imports; `FOLDER` is the unpacked wheel.
Writes `parser_VERSION.json` next to this file. No test runs it, because it needs the wheel of another engine."""

import argparse
import hashlib
import json
import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

MISSING = ("IPython", "orjson", "torchvision", "triton")
"""Packages that the arguments import and do not use."""


class Empty(MetaPathFinder, Loader):
    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".", maxsplit=1)[0] in MISSING else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module: Any = MagicMock(name=spec.name, __name__=spec.name, __path__=[], __spec__=spec, __version__="0")
        module.runtime.driver.active.get_current_target.side_effect = RuntimeError  # there is no GPU
        return module  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None: ...


def record(wheel: Path, folder: Path) -> None:
    version = wheel.name.split("-")[1]
    sys.meta_path.append(Empty())
    sys.path.insert(0, str(folder))
    parser = argparse.ArgumentParser()
    import_module("sglang.srt.server_args").ServerArgs.add_cli_args(parser)
    source = {"version": version, "wheel": wheel.name, "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest()}
    options = [_option(action) for action in parser._actions if action.dest != "help"]
    lines = ",\n".join(json.dumps(option, sort_keys=True) for option in options)
    path = Path(__file__).with_name(f"parser_{version}.json")
    path.write_text(f'{{"source": {json.dumps(source)}, "options": [\n{lines}\n]}}\n')


def _option(action: argparse.Action) -> dict[str, Any]:
    """Without what is usual: one value, a text, optional."""
    option: dict[str, Any] = {"flags": list(action.option_strings)}
    if action.nargs == 0:
        return option | {"switch": True}
    kind = getattr(action.type, "__name__", "str")
    option |= {"type": kind} if kind in ("int", "float") else {}
    option |= {"nargs": action.nargs} if action.nargs is not None else {}
    option |= {"choices": sorted(map(str, action.choices))} if action.choices is not None else {}
    return option | ({"required": True} if action.required else {})


if __name__ == "__main__":
    record(Path(sys.argv[1]), Path(sys.argv[2]))
