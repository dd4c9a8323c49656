"""Checks the weights and becomes an engine of another project: `python -m engine_agent.engines.checked_start
--model-dir DIR --digest DIGEST … -- COMMAND`. Standard library only. Exit status: 2 bad command line, 4 bad artifact,
126 the command cannot be run; then the engine's."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from engine_agent.engines.artifacts import mark_damaged, verify_folder
from engine_agent.engines.base import CELL_CERTIFICATE_VARIABLE, CELL_SECRET_VARIABLE
from engine_agent.protocol.manifest import BadArtifact

EXIT_BAD_ARTIFACT = 4
EXIT_CANNOT_RUN = 126
NOT_FOR_THE_ENGINE = ("PYTHONPATH", CELL_SECRET_VARIABLE, CELL_CERTIFICATE_VARIABLE)
"""This project's packages have common names that would hide the engine's, and the cell's secret is of no use to it."""
Become = Callable[[str, list[str], dict[str, str]], object]


def main(argv: Sequence[str], become: Become = os.execve) -> int:
    words = list(argv)
    place = words.index("--") if "--" in words else len(words)
    read, command = _parser().parse_args(words[:place]), words[place + 1 :]
    if not command:
        _print_line("no command follows --")
        return 2
    try:
        verify_folder(read.model_dir, read.digest or None)
    except (BadArtifact, OSError) as error:
        mark_damaged(read.model_dir)
        _print_line(str(error))
        return EXIT_BAD_ARTIFACT
    try:
        if read.link is not None:
            _link(read.link, read.model_dir)
        for path, text in read.files:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(text, encoding="utf-8")
        become(command[0], command, {n: v for n, v in os.environ.items() if n not in NOT_FOR_THE_ENGINE})
    except OSError as error:
        _print_line(f"cannot run {command[0]}: {error}")
        return EXIT_CANNOT_RUN
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="engine_agent.engines.checked_start", allow_abbrev=False)
    parser.add_argument("--node-id", required=True, help="node this engine runs on; also marks the process")
    parser.add_argument("--model-dir", required=True, type=Path)
    parser.add_argument("--digest", required=True, help="digest of the weights' manifest; empty accepts any")
    parser.add_argument("--link", type=Path, help="a link to the weights, whose name an engine gives the model")
    parser.add_argument(
        "--file", dest="files", nargs=2, action="append", default=[], metavar=("PATH", "TEXT"), help="written first"
    )
    return parser


def _link(link: Path, folder: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(folder)


def _print_line(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
