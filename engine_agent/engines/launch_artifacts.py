"""Gets what a plan names from S3 and then becomes the engine, in the same process and under the same id.

`python -m engine_agent.engines.launch_artifacts --cache DIR --health-port N --fetch URI DIGEST … -- COMMAND …`. Run by
the agent's Python, which can talk to S3; the engine's own need not. Until the engine listens, it says on the engine's
port how much has come. The locks of what it fetched pass to the engine, and end with it.

Exit status: 2 bad command line, 4 bad or missing artifact, 5 address in use; then what the engine says.
"""

import argparse
import os
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from engine_agent.engines.artifacts import (
    LIMIT_VARIABLE,
    CannotFetch,
    Entry,
    bytes_in,
    entry_of,
    hold,
    make_room,
    size_limit,
    total_of,
)
from engine_agent.engines.member_health import MemberHealth
from engine_agent.engines.s3_artifact import Arrived, Say, download, fetching_words
from engine_agent.protocol.messages import Artifact

EXIT_BAD_ARTIFACT = 4
EXIT_ADDRESS_IN_USE = 5
SAY_EVERY_S = 5.0
"""How often the words on progress change: each change is a report to the control plane."""
Become = Callable[[str, list[str]], object]


def main(argv: Sequence[str], become: Become = os.execv) -> int:
    """Fetch, then become the engine; returns only where that fails."""
    own, engine = _split(argv)
    parser = argparse.ArgumentParser(prog="engine_agent.engines.launch_artifacts", allow_abbrev=False)
    parser.add_argument("--cache", required=True, type=Path, help="the machine's folder for what comes from S3")
    parser.add_argument("--health-port", required=True, type=int, help="of GET /health on loopback until it is there")
    parser.add_argument("--fetch", nargs=2, action="append", required=True, metavar=("URI", "DIGEST"))
    read = parser.parse_args(own)
    if not engine:
        parser.error("the command to become is missing after --")
    try:
        progress = Progress(read.health_port)
    except OSError as error:
        _print_line(f"cannot listen on 127.0.0.1:{read.health_port}: {error.strerror}")
        return EXIT_ADDRESS_IN_USE
    held = []
    try:
        limit = size_limit(os.environ.get(LIMIT_VARIABLE, ""))
        for uri, digest in read.fetch:
            held.append(fetch_artifact(Artifact(uri, digest), read.cache, limit, progress, _print_line))
    except (CannotFetch, ValueError) as error:
        _print_line(str(error))
        return EXIT_BAD_ARTIFACT
    except OSError as error:
        _print_line(f"the cache {read.cache} cannot be used: {error}")
        return EXIT_BAD_ARTIFACT
    finally:
        progress.close()
    for descriptor in held:
        os.set_inheritable(descriptor, True)
    become(engine[0], engine)
    return 0


class Progress:
    """Says on a port, in words that change every few seconds, how far it is."""

    def __init__(self, port: int) -> None:
        """Listen.

        Raises:
            OSError: the port cannot be had.
        """
        self._words: Callable[[], str] = lambda: "looking for the artifact"
        self._health = MemberHealth(port, self._words())
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._say, name="progress", daemon=True)
        self._thread.start()

    def show(self, words: Callable[[], str]) -> None:
        self._words = words
        self._health.say(words())

    def close(self) -> None:
        """Listen no more: the port is the engine's."""
        self._ended.set()
        self._thread.join()
        self._health.close()

    def _say(self) -> None:
        while not self._ended.wait(SAY_EVERY_S):
            self._health.say(self._words())


def fetch_artifact(artifact: Artifact, cache: Path, limit: int | None, progress: Progress, say: Say) -> int:
    """Have the artifact in the cache, downloaded unless it is there; returns the descriptor of the lock that keeps it
    there. `limit`: bytes that the cache may have.

    Each file is checked as it comes; whoever loads the artifact checks the folder as it is then.

    Raises:
        CannotFetch: as in `download`.
        ValueError: its digest is none.
        OSError: the cache cannot be written.
    """
    entry = entry_of(artifact.digest, cache)

    def fill() -> None:
        arrived = Arrived()
        progress.show(arrived.words)
        download(artifact, entry, partial(make_room, entry, limit=limit), arrived, say)

    def on_wait() -> None:
        say(f"another start on this machine fetches {artifact.uri}, or reads what is damaged of it; waiting for it")
        progress.show(partial(_waiting_words, entry))

    return hold(entry, fill, on_wait)


def _waiting_words(entry: Entry) -> str:
    return f"waiting for another start: {fetching_words(bytes_in(entry.partial), total_of(entry))}"


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    given = list(argv)
    at = given.index("--") if "--" in given else len(given)
    return given[:at], given[at + 1 :]


def _print_line(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
