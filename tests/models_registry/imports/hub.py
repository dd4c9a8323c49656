"""A hub on this machine with the API of Hugging Face and of ModelScope, and every fault that an import must survive."""

import hashlib
import json
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from models_registry.imports.planner import ListedFile

COMMIT = 5 * "12fd25f7"
TOKEN = "hf_secret-of-the-test"
CONFIG = {
    "model_type": "llama",
    "hidden_size": 576,
    "vocab_size": 49152,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "num_hidden_layers": 30,
    "max_position_embeddings": 8192,
}
FILES = {
    "config.json": json.dumps(CONFIG).encode(),
    "tokenizer.json": b'{"version": "1.0"}',
    "model.safetensors": bytes(range(256)) * 4_000,
    "README.md": b"# A model",
    "modeling_custom.py": b"raise SystemExit",
    "original/consolidated.00.pth": b"pickle",
}


def listed(path: str, content: bytes, lfs: bool | None = None) -> dict[str, Any]:
    """As Hugging Face lists a file; large ones have a SHA-256."""
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": blob}
    if lfs if lfs is not None else path.endswith((".safetensors", ".gguf", ".bin", ".pth")):
        entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
    return entry


def as_listed(path: str, content: bytes = b"x") -> ListedFile:
    return ListedFile(path, len(content), hashlib.sha256(content).hexdigest())


@dataclass
class LocalHub:
    """`files`: content by path. `faults`: path -> what happens at the next requests for it, in order. `tree`: the
    listed entries, if they are not those of `files`. `gated`: a token is needed."""

    files: dict[str, bytes] = field(default_factory=lambda: dict(FILES))
    tree: Any = None
    gated: bool = False
    known: bool = True
    revisions: tuple[str, ...] = ("main", "v1.0", COMMIT)
    faults: dict[str, list[str]] = field(default_factory=dict)
    elsewhere: str = ""
    page: int = 1000
    url: str = ""
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    """(path, Range, Authorization or Cookie) of each request."""
    at_bytes: Callable[[str], None] = lambda path: None
    """Called in the middle of each download."""

    def requests_for(self, path: str) -> list[str]:
        return [bytes_ for asked, bytes_, _ in self.asked if asked.endswith(f"/{path}")]

    def entries(self) -> Any:
        return [listed(path, content) for path, content in self.files.items()] if self.tree is None else self.tree


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: LocalHub

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, url = self.hub, urlsplit(self.path)
        path, query = unquote(url.path), parse_qs(url.query)
        credentials = self.headers.get("Authorization") or self.headers.get("Cookie") or ""
        asked = query["FilePath"][0] if "FilePath" in query else path
        hub.asked.append((f"/{asked}".replace("//", "/"), self.headers.get("Range", ""), credentials))
        if path.startswith("/cdn/"):
            self._content(path.removeprefix("/cdn/"))
        elif not hub.known:
            self._refuse(404 if credentials else 401, "RepoNotFound")
        elif hub.gated and TOKEN not in credentials:
            self._refuse(403, "GatedRepo")
        elif path.startswith("/api/v1/models/"):
            self._modelscope(path, query)
        elif path.startswith(f"/org/model/resolve/{COMMIT}/"):
            self._file(path.removeprefix(f"/org/model/resolve/{COMMIT}/"))
        else:
            self._hugging_face(path, query)

    def _hugging_face(self, path: str, query: dict[str, list[str]]) -> None:
        hub = self.hub
        if path.startswith("/api/models/org/model/revision/"):
            tags = ["text-generation", "license:apache-2.0"]
            if path.rpartition("/revision/")[2] in hub.revisions:
                self._json({"id": "org/model", "sha": COMMIT, "tags": tags, "gated": hub.gated})
            else:
                self._refuse(404, "RevisionNotFound")
        elif path == f"/api/models/org/model/tree/{COMMIT}":
            start = int(query.get("cursor", ["0"])[0])
            entries, after = hub.entries(), start + hub.page
            link = f'<{hub.url}/api/models/org/model/tree/{COMMIT}?recursive=true&cursor={after}>; rel="next"'
            shown = entries[start:after] if isinstance(entries, list) else entries
            self._json(shown, {"Link": link} if after < len(entries) else {})
        else:
            self._refuse(404, "RepoNotFound")

    def _modelscope(self, path: str, query: dict[str, list[str]]) -> None:
        if path == "/api/v1/models/org/model":
            self._json({"Code": 200, "Data": {"License": "Apache License 2.0", "Tags": ["text"]}})
        elif path == "/api/v1/models/org/model/repo/files":
            files = [
                {"Type": "blob", "Path": name, "Size": len(content), "Sha256": hashlib.sha256(content).hexdigest(),
                 "Revision": COMMIT}
                for name, content in self.hub.files.items()
            ]  # fmt: skip
            self._json({"Code": 200, "Data": {"Files": [{"Type": "tree", "Path": "original"}, *files]}})
        elif path == "/api/v1/models/org/model/repo" and query["Revision"] == [COMMIT]:
            self._file(query["FilePath"][0])
        else:
            self._refuse(404, "")

    def _file(self, path: str) -> None:
        hub = self.hub
        if path not in hub.files:
            self._refuse(404, "EntryNotFound")
        elif hub.elsewhere and path.endswith(".safetensors"):
            self.send_response(302)
            self.send_header("Location", hub.elsewhere.format(path=path))
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            self._content(path)

    def _content(self, path: str) -> None:
        hub = self.hub
        content, fault = hub.files[path], (hub.faults.get(path) or [""]).pop(0)
        if fault.isdigit():
            self._refuse(int(fault), "")
            return
        if fault == "wrong":
            content = bytes(len(content))
        if fault == "longer":
            content += b"more"
        ranged = self.headers.get("Range", "")
        start = int(ranged.removeprefix("bytes=").removesuffix("-")) if ranged and fault != "whole" else 0
        self.send_response(206 if start else 200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha256(hub.files[path]).hexdigest()}"')
        if start:
            shown = start + 1 if fault == "other range" else start
            self.send_header("Content-Range", f"bytes {shown}-{len(content) - 1}/{len(content)}")
        if fault == "gzip":
            self.send_header("Content-Encoding", "gzip")
        if fault == "longer":
            self.close_connection = True  # without a length, so that only the bytes tell
        else:
            self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        if self.command == "HEAD":
            return
        middle = start + (len(content) - start) // 2
        self.wfile.write(content[start:middle])
        hub.at_bytes(path)
        if fault == "broken":
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        self.wfile.write(content[middle:])

    def _json(self, value: Any, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        for name, text in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        for name, text in {"X-Error-Code": code, "X-Error-Message": "no", "Content-Length": "0"}.items():
            self.send_header(name, text)
        self.end_headers()


@contextmanager
def local_hub(port: int = 0) -> Iterator[LocalHub]:
    """On any free port by default."""
    hub = LocalHub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def serve_folder(folder: Path, port: int) -> None:
    """Serves a folder as the repository `org/model` on loopback, until this process ends."""
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"}
    hub = LocalHub(files=files, url=f"http://127.0.0.1:{port}")
    handler = type("Handler", (_Handler,), {"hub": hub})
    ThreadingHTTPServer(("127.0.0.1", port), handler).serve_forever()


if __name__ == "__main__":
    serve_folder(Path(sys.argv[1]), int(sys.argv[2]))
