"""Builds for tests: one with a real Python and a small engine, packed once in a session, and facts for others."""

import gzip
import io
import json
import random
import shutil
import tarfile
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import msgspec

from engine_agent.engines.artifacts import describe_folder, read_manifest, write_manifest
from engine_agent.engines.builds.pack import PackSource, pack_build
from engine_agent.protocol.engine_builds import BUILD_FILE, BuildFacts, EngineBuild, parse_facts, part_names

SERVE = '#!/bin/sh\nhere=$(dirname "$0")\nexec "$here/bin/python" -I "$here/serve.py" "$@"\n'
Member = tuple[str, bytes | str]
ENGINE = Path(__file__).with_name("tiny_engine.py")
FACTS: dict[str, Any] = {
    "serves": "generic/llama-cpp",
    "version": "1",
    "platform": "cpu",
    "program": "serve",
    "python": "3.11.7",
    "cpu_arch": "x86_64",
    "least_glibc": "2.17",
    "unpacked_bytes": 1000,
    "packed_bytes": 100,
    "parts": 1,
}


def facts(**changes: Any) -> BuildFacts:
    return parse_facts(json.dumps({**FACTS, **changes}), "test")


def pack_tiny(to: Path, *, compiled: bool = False) -> str:
    """Packs the small engine with this process's Python; returns the digest."""
    script = Path(mkdtemp()) / "serve"
    script.write_text(SERVE)
    script.chmod(0o755)
    source = PackSource("generic/llama-cpp", "1", "cpu", program="serve", files={"serve": script, "serve.py": ENGINE})
    return pack_build(source, to, lambda _: None, compiled=compiled, part_bytes=16 * 1024**2)


@cache
def tiny_build() -> Path:
    """The folder of the packed small engine. Tests only read it."""
    folder = Path(mkdtemp()) / "tiny"
    pack_tiny(folder)
    return folder


def tar_of(*members: tarfile.TarInfo | Member) -> bytes:
    """An archive of files (bytes), links (text) and other members."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member)
                continue
            name, what = member
            entry = tarfile.TarInfo(name)
            if isinstance(what, str):
                entry.type, entry.linkname = tarfile.SYMTYPE, what
                tar.addfile(entry)
            else:
                entry.size, entry.mode = len(what), 0o755
                tar.addfile(entry, io.BytesIO(what))
    return content.getvalue()


def folder_of(to: Path, content: bytes, parts: int = 2, **changes: Any) -> Path:
    """The folder of a build with this archive, cut into parts."""
    length = max(1, -(-len(content) // parts))
    pieces = [gzip.compress(content[number * length : (number + 1) * length], mtime=0) for number in range(parts)]
    stated = facts(parts=parts, packed_bytes=sum(map(len, pieces)), **changes)
    to.mkdir(parents=True)
    for name, piece in zip(part_names(stated), pieces, strict=True):
        (to / name).write_bytes(piece)
    (to / BUILD_FILE).write_bytes(msgspec.json.encode(stated))
    write_manifest(to, describe_folder(to, {}))
    return to


def small_build(to: Path, **changes: Any) -> Path:
    """The folder of a build that cannot run, in four parts."""
    noise = random.Random(1).randbytes(40_000)  # else it would fit into one part
    return folder_of(
        to, tar_of(("noise", noise), ("serve", b"#!/bin/sh\n")), 4, **{"unpacked_bytes": 50_000, **changes}
    )


def ordered(folder: Path, name: str = "tiny-1", uri: str = "") -> EngineBuild:
    """A packed build as an order names it."""
    stated = parse_facts((folder / BUILD_FILE).read_bytes(), "test")
    return EngineBuild(name, read_manifest(folder).digest, uri, stated)


def copied(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    return to
