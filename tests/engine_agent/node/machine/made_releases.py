"""Releases of a small substitute agent, and a server for them."""

import http.server
import io
import sys
import tarfile
import threading
from hashlib import sha256
from pathlib import Path

import msgspec

from engine_agent.node.machine.paths import HostPaths
from engine_agent.protocol.machine_messages import RELEASE_FILE, Release, ReleaseOrder

OLD, NEW = "0" * 16, "1" * 16
AGENT = """
import os, signal, sys
from pathlib import Path
if sys.argv[1] == "check":
    sys.exit({check!r})
code = Path(sys.argv[-1])
with (code / "starts").open("a") as starts:
    starts.write(f"{name} {{os.getpid()}}\\n")
{then}
"""
"""A substitute for an agent: it records its start and follows its release."""


def files(name: str, *, then: str = "", check: object = 0) -> dict[str, str]:
    return {
        "engine_agent/__init__.py": "",
        "engine_agent/__main__.py": AGENT.format(name=name, then=then, check=check),
        RELEASE_FILE: msgspec.json.encode(Release(name, "0.1.0", 2)).decode(),
    }


def archive(content: dict[str, str]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, text in content.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(text.encode()), 0o644
            tar.addfile(entry, io.BytesIO(text.encode()))
    return packed.getvalue()


def order(packed: bytes, name: str = NEW, **changes: object) -> ReleaseOrder:
    made = ReleaseOrder(name, sha256(packed).hexdigest(), len(packed), 1)
    return msgspec.structs.replace(made, **changes)


def put(paths: HostPaths, folder: str, content: dict[str, str]) -> Path:
    """Installs a release with an environment that finds it."""
    whole = paths.releases / folder
    for name, text in content.items():
        (whole / name).parent.mkdir(parents=True, exist_ok=True)
        (whole / name).write_text(text)
    python = whole / "venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\ncd "{whole}" && exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return whole


class Server:
    """Serves one archive in two halves, with the credential. `busy`: first answers, with the seconds of their
    `Retry-After`; `cut`: how often it closes between the halves; `half_way`: set after the first half; the second
    follows when `go_on` is set."""

    def __init__(self) -> None:
        self.packed = b""
        self.asked: list[str] = []
        self.busy: list[tuple[int, str]] = []
        self.cut = 0
        self.half_way, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked.append(self.path)
                if outer.busy:
                    status, after = outer.busy.pop(0)
                    self.send_response(status)
                    self.send_header("Retry-After", after)
                    self.end_headers()
                    return
                allowed = self.headers["Authorization"] == "Bearer secret" and outer.packed
                packed = outer.packed if allowed else b""
                self.send_response(200 if allowed else 404)
                if outer.cut:
                    self.send_header("Content-Length", str(len(packed)))
                self.end_headers()
                self.wfile.write(packed[: len(packed) // 2])
                outer.half_way.set()
                if outer.cut:
                    outer.cut -= 1
                elif outer.go_on.wait(60):
                    self.wfile.write(packed[len(packed) // 2 :])

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.go_on.set()
        self._server.shutdown()
        self._server.server_close()
