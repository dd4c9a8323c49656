"""Gets the weights of a Neuron rank and then becomes its engine, in the same process and under the same id.

`python -m engine_agent.engines.neuron.launch --python P --artifacts DIR --fetch URI DIGEST … -- <options of serve>`.
Run by the agent's Python, which can talk to S3; the engine's own need not. Artifacts on disk are left to the engine,
which checks every folder before it loads it.

Exit status: 2 bad command line, 4 bad or missing artifact; then what `engine_agent.engines.neuron.serve` says.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from engine_agent.engines.s3_artifact import CannotFetch, fetch_artifact
from engine_agent.protocol.messages import Artifact

EXIT_BAD_ARTIFACT = 4
SERVE = "engine_agent.engines.neuron.serve"
Become = Callable[[str, list[str]], object]


def main(argv: Sequence[str], become: Become = os.execv) -> int:
    """Fetch, then become the engine; returns only where that fails."""
    own, engine = _split(argv)
    parser = argparse.ArgumentParser(prog="engine_agent.engines.neuron.launch", allow_abbrev=False)
    parser.add_argument("--python", required=True, help="the engine's interpreter")
    parser.add_argument("--artifacts", required=True, type=Path, help="folder for what comes from S3")
    parser.add_argument("--fetch", nargs=2, action="append", default=[], metavar=("URI", "DIGEST"))
    read = parser.parse_args(own)
    artifacts = [Artifact(uri, digest) for uri, digest in read.fetch]
    try:
        for artifact in artifacts:
            if artifact.uri.startswith("s3://"):
                fetch_artifact(artifact, read.artifacts, _print_line)
    except CannotFetch as error:
        _print_line(str(error))
        return EXIT_BAD_ARTIFACT
    compiled = os.environ.get("NEURON_COMPILED_ARTIFACTS", "")
    if compiled.startswith("/"):
        Path(compiled).parent.mkdir(parents=True, exist_ok=True)  # the folder itself is the compiler's to make
    become(read.python, [read.python, "-m", SERVE, *engine])
    return 0


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    given = list(argv)
    at = given.index("--") if "--" in given else len(given)
    return given[:at], given[at + 1 :]


def _print_line(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
