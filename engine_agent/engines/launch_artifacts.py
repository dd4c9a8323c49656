"""Fetches a plan's artifacts from S3 and then becomes the engine, in the same process.

`python -m engine_agent.engines.launch_artifacts --cache DIR --health-port N --fetch URI DIGEST … -- COMMAND …`. Run by
the agent's Python, which has an S3 client. It reports progress on the engine's port until the engine listens there. The
engine inherits the locks of the fetched artifacts and releases them when it exits.

Exit status: 2 bad command line, 4 bad or missing artifact, 5 address in use; then the engine's."""

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
    acquire,
    bytes_in,
    entry_of,
    make_room,
    size_limit,
    total_of,
)
from engine_agent.engines.member_health import MemberHealth
from engine_agent.engines.s3_artifact import Arrived, Say, download, fetching_words
from engine_agent.protocol.messages import Artifact

EXIT_BAD_ARTIFACT = 4
EXIT_ADDRESS_IN_USE = 5
PROGRESS_EVERY_S = 5.0
"""Interval of progress updates; each one causes a report to the control plane."""
Become = Callable[[str, list[str]], object]


def main(argv: Sequence[str], become: Become = os.execv) -> int:
    own, engine = _split(argv)
    parser = argparse.ArgumentParser(prog="engine_agent.engines.launch_artifacts", allow_abbrev=False)
    parser.add_argument("--cache", required=True, type=Path, help="the machine's folder for what comes from S3")
    parser.add_argument("--health-port", required=True, type=int, help="of GET /health on loopback during the download")
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
    """Serves the progress on a port; the text changes every few seconds."""

    def __init__(self, port: int) -> None:
        """Raises OSError if the port cannot be bound."""
        self._words: Callable[[], str] = lambda: "looking for the artifact"
        self._health = MemberHealth(port, self._words())
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._report_progress, name="progress", daemon=True)
        self._thread.start()

    def show(self, words: Callable[[], str]) -> None:
        self._words = words
        self._health.say(words())

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self._health.close()

    def _report_progress(self) -> None:
        while not self._ended.wait(PROGRESS_EVERY_S):
            self._health.say(self._words())


def fetch_artifact(artifact: Artifact, cache: Path, limit: int | None, progress: Progress, say: Say) -> int:
    """Fetches the artifact into the cache unless it is there; returns the descriptor of its lock. `limit` is the
    maximum size of the cache in bytes.

    Each file is checked while it arrives; the launcher checks the folder again before it loads. Raises CannotFetch as
    in `download`. Raises ValueError if its digest is malformed. Raises OSError if the cache cannot be written."""
    entry = entry_of(artifact.digest, cache)

    def fill() -> None:
        arrived = Arrived()
        progress.show(arrived.words)
        download(artifact, entry, partial(make_room, entry, limit=limit), arrived, say)

    def on_wait() -> None:
        say(f"another process on this machine fetches {artifact.uri} or checks its files; waiting for it")
        progress.show(
            lambda: f"waiting for another process: {fetching_words(bytes_in(entry.partial), total_of(entry))}"
        )

    return acquire(entry, fill, on_wait)


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    given = list(argv)
    at = given.index("--") if "--" in given else len(given)
    return given[:at], given[at + 1 :]


def _print_line(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
