"""Checks the weights and becomes a third-party program: `python -m engine_agent.engines.generic.serve --program PATH …
[-- options]`. Standard library only. Exit status: 2 bad command line, 4 bad artifact, 126 the program cannot be run;
then the program's."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from engine_agent.engines.artifacts import mark_damaged, verify_folder
from engine_agent.protocol.manifest import BadArtifact

EXIT_BAD_ARTIFACT = 4
EXIT_CANNOT_RUN = 126
LOOPBACK = "127.0.0.1"
Become = Callable[[str, list[str]], object]


def main(argv: Sequence[str], become: Become = os.execv) -> int:
    own, options = _parted(argv)
    parser = argparse.ArgumentParser(prog="engine_agent.engines.generic.serve", allow_abbrev=False)
    parser.add_argument("--node-id", required=True, help="node this engine runs on")
    parser.add_argument("--program", required=True, help="the program to execute")
    parser.add_argument("--model-dir", required=True, type=Path)
    parser.add_argument("--digest", required=True, help="digest of the weights' manifest; empty accepts any")
    parser.add_argument("--alias", required=True, help="the model's name in requests")
    parser.add_argument("--port", required=True, type=int)
    read = parser.parse_args(own)
    try:
        verify_folder(read.model_dir, read.digest or None)
        model = _model_in(read.model_dir)
    except (BadArtifact, OSError) as error:
        mark_damaged(read.model_dir)
        _print_line(str(error))
        return EXIT_BAD_ARTIFACT
    command = [
        *(read.program, "--model", str(model), "--alias", read.alias),
        *("--host", LOOPBACK, "--port", str(read.port), *options),
    ]
    try:
        become(command[0], command)
    except OSError as error:
        _print_line(f"cannot run {read.program}: {error.strerror}")
        return EXIT_CANNOT_RUN
    return 0


def _model_in(folder: Path) -> Path:
    """Returns the GGUF file of a folder, or the folder if there is none. Raises BadArtifact if there are several."""
    files = sorted(folder.glob("*.gguf"))
    if len(files) > 1:
        raise BadArtifact(f"{folder} has {files[0].name} and {files[1].name}; an artifact has one GGUF file")
    return files[0] if files else folder


def _parted(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    words = list(argv)
    place = words.index("--") if "--" in words else len(words)
    return words[:place], words[place + 1 :]


def _print_line(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
