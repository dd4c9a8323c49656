"""Reads repositories of Hugging Face and ModelScope, or of mirrors with their API, over HTTP: the commit of a revision,
the list of files, and the bytes of a file from an offset.

The token goes only to the hub's own origin. Redirects are followed by hand: never from HTTPS to HTTP, and never from a
public hub to a private address. Answers are bounded, and no text of a hub enters a log."""

import ipaddress
import socket
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Protocol
from urllib.parse import quote, urljoin, urlsplit

import httpx
from django.conf import settings

from kernel.decoding import decode_json
from models_registry.imports.planner import (
    CannotImport,
    HubKind,
    ImportLimits,
    ListedFile,
    Repository,
    Snapshot,
    is_commit,
)

TIMEOUT = httpx.Timeout(15.0, connect=10.0)
MOST_JSON_BYTES = 16 * 1024**2
LONGEST_JSON_S = 120.0
MOST_PAGES = 200
MOST_REDIRECTS = 5
MOST_TAGS, LONGEST_TAG = 100, 100
_RETRIED = frozenset({408, 425, 429})


class HubTrouble(Exception):
    """The hub did not answer as expected; a retry may help."""


@dataclass(frozen=True, slots=True)
class HubAccess:
    """Origin and token of a hub. `endpoint` empty: not configured."""

    endpoint: str
    token: str = field(default="", repr=False)


Content = AbstractContextManager[tuple[int, Iterator[bytes]]]


class Hub(Protocol):
    def snapshot(self, repository: Repository, limits: ImportLimits) -> Snapshot:
        """Resolve the revision and list its files. Raises CannotImport and HubTrouble."""

    def content(self, repository: Repository, revision: str, file: ListedFile, start: int) -> Content:
        """Context manager: the bytes of a file from `start`, or from 0 if the hub ignores the range."""


def hub_access(kind: HubKind) -> HubAccess:
    """Raises CannotImport if the hub is not configured."""
    endpoint, token = {
        HubKind.HF: (settings.HF_ENDPOINT, settings.HF_TOKEN),
        HubKind.MODELSCOPE: (settings.MODELSCOPE_ENDPOINT, settings.MODELSCOPE_TOKEN),
    }[kind]
    if not endpoint:
        variable, public = {
            HubKind.HF: ("SWITCHYARD_HF_ENDPOINT", "https://huggingface.co"),
            HubKind.MODELSCOPE: ("SWITCHYARD_MODELSCOPE_ENDPOINT", "https://modelscope.cn"),
        }[kind]
        raise CannotImport(f"no hub is configured for {kind}://; set {variable} to {public} or a mirror")
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc or parts.query:
        raise CannotImport(f"the endpoint of {kind}:// must be https://HOST or https://HOST/PATH, without a user")
    return HubAccess(endpoint.rstrip("/"), token)


@contextmanager
def hub_open(kind: HubKind) -> "Iterator[Hub]":
    with httpx.Client(timeout=TIMEOUT, follow_redirects=False) as client:
        yield (HuggingFace if kind is HubKind.HF else ModelScope)(client, hub_access(kind))


class _Api:
    """What both hubs share. Threads may share one."""

    def __init__(self, client: httpx.Client, access: HubAccess) -> None:
        self._client, self._access = client, access

    def credentials(self) -> Mapping[str, str]:
        raise NotImplementedError

    def explain(self, response: httpx.Response, what: str) -> Exception:
        raise NotImplementedError

    def json(self, url: str, what: str) -> tuple[Any, str]:
        """A bounded JSON answer, and the URL of the next page if there is one."""
        with self.get(url, what) as response:
            text, until_s = bytearray(), monotonic() + LONGEST_JSON_S
            for piece in _pieces(response, what):
                text += piece
                if len(text) > MOST_JSON_BYTES:
                    raise CannotImport(f"{what}: the hub's answer has more than {MOST_JSON_BYTES} bytes")
                if monotonic() > until_s:
                    raise HubTrouble(f"{what}: the hub did not complete its answer in {LONGEST_JSON_S:g} s")
            try:
                return decode_json(bytes(text)), str(response.links.get("next", {}).get("url", ""))
            except ValueError:
                raise HubTrouble(f"{what}: the hub's answer is not JSON, or has a text that cannot be stored") from None

    @contextmanager
    def get(self, url: str, what: str, start: int = 0) -> Iterator[httpx.Response]:
        """The first answer that is no redirect; its status is 200 or 206."""
        for _ in range(MOST_REDIRECTS + 1):
            headers = {"Accept-Encoding": "identity", "User-Agent": "switchyard"}
            headers |= {"Range": f"bytes={start}-"} if start else {}
            is_own = _origin(url) == _origin(self._access.endpoint)
            headers |= self.credentials() if self._access.token and is_own else {}
            try:
                with self._client.stream("GET", url, headers=headers) as response:
                    if not response.has_redirect_location:
                        if response.status_code not in (200, 206):
                            raise self._refused(response, what)
                        yield response
                        return
                    url = self._followed(url, response.headers["Location"], what)
            except httpx.HTTPError as error:
                raise HubTrouble(f"{what}: {_cause(error)} ({urlsplit(url).hostname})") from None
            except httpx.InvalidURL:
                raise CannotImport(f"{what}: the hub redirects to something that is not a URL") from None
        raise CannotImport(f"{what}: more than {MOST_REDIRECTS} redirects")

    def _refused(self, response: httpx.Response, what: str) -> Exception:
        status = response.status_code
        if status >= 500 or status in _RETRIED:
            return HubTrouble(f"{what}: the hub answered {status}")
        if status == 416:
            return HubTrouble(f"{what}: the hub has fewer bytes than it lists")
        return self.explain(response, what)

    def _followed(self, url: str, location: str, what: str) -> str:
        refusal = CannotImport(f"{what}: the hub redirects to something other than HTTPS, which is not followed")
        try:
            target = urljoin(url, location)
            parts = urlsplit(target)
            is_web = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            raise refusal from None
        if not is_web or (parts.scheme == "http" and urlsplit(url).scheme == "https"):
            raise refusal
        own, addresses = _addresses(urlsplit(self._access.endpoint).hostname), _addresses(parts.hostname)
        is_inward = all(one.is_global for one in own) and not all(one.is_global for one in addresses)
        if is_inward or any(one.is_link_local for one in addresses):
            raise CannotImport(f"{what}: the hub redirects to a private address, which is not followed")
        return target

    @contextmanager
    def content_of(self, url: str, file: ListedFile, start: int) -> Iterator[tuple[int, Iterator[bytes]]]:
        with self.get(url, file.path, start) as response:
            if response.headers.get("Content-Encoding", "identity") != "identity":
                raise CannotImport(f"{file.path}: the hub compresses it although that was not requested")
            is_part = response.status_code == 206
            if is_part and not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
                raise HubTrouble(f"{file.path}: the hub sent another range than the requested one")
            yield start if is_part else 0, _pieces(response, file.path)


class HuggingFace(_Api):
    def credentials(self) -> Mapping[str, str]:
        return {"Authorization": f"Bearer {self._access.token}"}

    def snapshot(self, repository: Repository, limits: ImportLimits) -> Snapshot:
        name = f"{self._access.endpoint}/api/models/{repository.name}"
        found, _ = self.json(f"{name}/revision/{quote(repository.revision, safe='')}", str(repository))
        commit = found.get("sha") if isinstance(found, dict) else None
        if not isinstance(commit, str) or not is_commit(commit):
            raise HubTrouble(f"{repository}: the hub named no commit")
        files: list[ListedFile] = []
        url, pages = f"{name}/tree/{commit}?recursive=true", 0
        while url:
            page, after = self.json(url, str(repository))
            pages += 1
            files += _listed_of(page, _hf_file, repository)
            if len(files) > limits.listed or pages > MOST_PAGES:
                raise CannotImport(f"the repository has more than {limits.listed} files")
            url = urljoin(url, after) if after and page else ""
            if url and _origin(url) != _origin(self._access.endpoint):
                raise CannotImport(f"{repository}: the list of files continues on another host, which is not followed")
        tags = _tags_of(found.get("tags"))
        card = found.get("cardData")
        stated = card.get("license") if isinstance(card, dict) else None
        tagged = next((tag.removeprefix("license:") for tag in tags if tag.startswith("license:")), "")
        return Snapshot(commit, tuple(files), _plain(stated, 64) or tagged[:64], tags)

    def content(self, repository: Repository, revision: str, file: ListedFile, start: int) -> Content:
        url = f"{self._access.endpoint}/{repository.name}/resolve/{revision}/{quote(file.path)}"
        return self.content_of(url, file, start)

    def explain(self, response: httpx.Response, what: str) -> Exception:
        code, status = response.headers.get("X-Error-Code", ""), response.status_code
        has_token = bool(self._access.token)
        texts = {
            "GatedRepo": "the repository is gated: request access on its page, and set SWITCHYARD_HF_TOKEN to a token "
            "of the account that has it",
            "RevisionNotFound": "the repository has no such revision: name a branch, tag or commit of it",
            "EntryNotFound": "the hub lists the file but does not have it",
            "RepoNotFound": "the repository does not exist, or is private: check its name, and set SWITCHYARD_HF_TOKEN "
            "to a token that may read it",
        }
        usual = {401: "RepoNotFound", 403: "GatedRepo", 404: "RepoNotFound"}
        text = texts.get(code) or texts.get(usual.get(status, ""), f"the hub answered {status}")
        if status == 401 and has_token:
            text += "; the present token is not accepted"
        return CannotImport(f"{what}: {text}")


class ModelScope(_Api):
    def credentials(self) -> Mapping[str, str]:
        return {"Cookie": f"m_session_id={self._access.token}"}

    def snapshot(self, repository: Repository, limits: ImportLimits) -> Snapshot:
        name = f"{self._access.endpoint}/api/v1/models/{repository.name}"
        revision = quote(repository.revision, safe="")
        about = self._content(f"{name}?Revision={revision}", repository)
        listed = self._content(f"{name}/repo/files?Revision={revision}&Recursive=true", repository)
        files = _listed_of(listed.get("Files"), _modelscope_file, repository)
        if len(files) > limits.listed:
            raise CannotImport(f"the repository has more than {limits.listed} files")
        last = listed.get("LatestCommitter")
        commit = last.get("Id") if isinstance(last, dict) else None
        is_pinned = isinstance(commit, str) and is_commit(commit)
        return Snapshot(
            str(commit) if is_pinned else repository.revision,
            tuple(files),
            _plain(about.get("License"), 64),
            _tags_of(about.get("Tags")),
        )

    def _content(self, url: str, repository: Repository) -> dict[str, Any]:
        answer, _ = self.json(url, str(repository))
        found = answer.get("Data") if isinstance(answer, dict) and answer.get("Code") == 200 else None
        if not isinstance(found, dict):
            raise HubTrouble(f"{repository}: the hub's answer has no data")
        return found

    def content(self, repository: Repository, revision: str, file: ListedFile, start: int) -> Content:
        pinned = quote(file.revision or revision, safe="")
        url = f"{self._access.endpoint}/api/v1/models/{repository.name}/repo?Revision={pinned}&FilePath="
        return self.content_of(url + quote(file.path, safe=""), file, start)

    def explain(self, response: httpx.Response, what: str) -> Exception:
        if response.status_code in (401, 403, 404):
            return CannotImport(
                f"{what}: the repository, revision or file does not exist, or needs a token: check the name, and set "
                "SWITCHYARD_MODELSCOPE_TOKEN to a token that may read it"
            )
        return CannotImport(f"{what}: the hub answered {response.status_code}")


def _listed_of(page: Any, read: Any, repository: Repository) -> list[ListedFile]:
    """Raises HubTrouble if this is not a list of files."""
    try:
        return [file for entry in page if (file := read(entry)) is not None]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise HubTrouble(f"{repository}: the hub's list of files cannot be read") from None


def _hf_file(entry: Any) -> ListedFile | None:
    if entry["type"] != "file":
        return None
    lfs = entry.get("lfs") or {}
    size = lfs["size"] if lfs else entry["size"]
    return ListedFile(_text(entry["path"]), _whole(size), _text(lfs.get("oid", "")), _text(entry["oid"]))


def _modelscope_file(entry: Any) -> ListedFile | None:
    if entry.get("Type") == "tree":
        return None
    revision = entry.get("Revision") or ""
    return ListedFile(
        _text(entry["Path"]),
        _whole(entry["Size"]),
        _text(entry["Sha256"]),
        revision=revision if is_commit(revision) else "",
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError
    return value


def _tags_of(value: Any) -> tuple[str, ...]:
    tags = value[:MOST_TAGS] if isinstance(value, list) else []
    return tuple(filter(None, (_plain(tag, LONGEST_TAG) for tag in tags)))


def _plain(value: Any, longest: int) -> str:
    """Text that screens and PostgreSQL accept, or empty."""
    return value[:longest] if isinstance(value, str) and value.isprintable() else ""


def _pieces(response: httpx.Response, what: str) -> Iterator[bytes]:
    try:
        yield from response.iter_raw()  # as they arrive: what is buffered would be lost with the connection
    except httpx.HTTPError as error:
        raise HubTrouble(f"{what}: {_cause(error)}") from None


def _cause(error: httpx.HTTPError) -> str:
    """Without URLs: those of redirects may be signed."""
    if isinstance(error, httpx.TimeoutException):
        return "the hub did not answer in time"
    if isinstance(error, httpx.ConnectError):
        return "the hub cannot be reached"
    return "the connection broke"


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"https": 443, "http": 80}.get(parts.scheme)


def _addresses(host: str | None) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Empty if the host cannot be resolved, which is left to the connection."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]
