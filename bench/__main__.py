"""Measurements: `python -m bench NAME [options]`.

A bench is a module in a folder here with a `main` that takes a parser. The first line of its docstring is its help.
Only the module that is named is imported: others may need torch, a fleet or a cloud."""

import argparse
import asyncio
import inspect
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

HERE = Path(__file__).parent
CLIENT = HERE.parent / "client"
"""Of this checkout. Benches with users import it, and it is not installed."""


def benches() -> dict[str, Path]:
    return {path.stem: path for path in sorted(HERE.glob("*/*.py")) if "def main(parser" in path.read_text()}


def summary(path: Path) -> str:
    return path.read_text().partition("\n")[0].strip('"')


def listing() -> str:
    lines: list[str] = []
    subject = ""
    for name, path in benches().items():
        if path.parent.name != subject:
            subject = path.parent.name
            lines += ["", f"{subject}:"]
        lines.append(f"  {name:<22} {summary(path)}")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    found = benches()
    if not arguments or arguments[0] in {"-h", "--help"}:
        print(f"python -m bench NAME [options]; `python -m bench NAME --help` explains one.\n{listing()}")
        return 0 if arguments else 2
    name, *options = arguments
    if name not in found:
        print(f"There is no bench {name!r}. `python -m bench --help` lists them.", file=sys.stderr)
        return 2
    sys.path.append(str(CLIENT))
    sys.argv = [f"python -m bench {name}", *options]
    try:
        module = import_module(f"bench.{found[name].parent.name}.{name}")
    except ModuleNotFoundError as error:
        print(f"{name} needs the package {error.name}, which {sys.executable} does not have.", file=sys.stderr)
        return 2
    parser = argparse.ArgumentParser(
        prog=sys.argv[0], description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    status = module.main(parser)
    if inspect.iscoroutine(status):
        status = asyncio.run(status)
    return int(status or 0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # benches stop what they have started
    sys.exit(main(sys.argv[1:]))
