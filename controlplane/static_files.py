"""Static files under names with a digest of their content, compressed, and cached by browsers without expiry.

WhiteNoise does the work. Instead of `collectstatic`, the first request of a file makes a copy under its hashed name
and a compressed one, in a temporary folder of the process. So web starts without a collecting step, and no folder is
older than the code. With `DEBUG` names stay unchanged."""

import atexit
import hashlib
import shutil
import tempfile
import threading
from functools import cache
from pathlib import Path
from typing import Any

from django.conf import settings
from django.contrib.staticfiles import finders
from django.contrib.staticfiles.storage import StaticFilesStorage, staticfiles_storage
from whitenoise.compress import Compressor
from whitenoise.middleware import WhiteNoiseMiddleware

DIGEST_CHARS = 12
VENDORED = "vendor/"
"""Names there have a version (VENDOR.md), so stylesheets may name fonts there as they are."""


class HashedStaticFiles(StaticFilesStorage):
    def url(self, name: str | None) -> str:
        return super().url(name if settings.DEBUG or name is None else hashed_name(name))


class StaticFilesMiddleware(WhiteNoiseMiddleware):  # type: ignore[misc]  # whitenoise has no types
    def __init__(self, get_response: Any) -> None:
        super().__init__(get_response)
        self._adding = threading.Lock()

    def __call__(self, request: Any) -> Any:
        path = request.path_info
        if self.autorefresh or path in self.files or not path.startswith(self.static_prefix):
            return super().__call__(request)
        found = self._hashed(path)
        return self.get_response(request) if found is None else self.serve(found, request)

    def immutable_file_test(self, path: str, url: str) -> bool:
        return url.startswith(self.static_prefix + VENDORED) or super().immutable_file_test(path, url)

    def _hashed(self, url: str) -> Any:
        """The file of a hashed name. The hash of another release gets the present file, cached for a minute: pages of
        a host that runs that release ask for it."""
        name = self.get_name_without_hash(url.removeprefix(self.static_prefix))
        if (plain := self.files.get(self.static_prefix + name)) is None or staticfiles_storage.url(name) != url:
            return plain
        with self._adding:
            if url not in self.files:
                self.add_file_to_dictionary(url, str(_compressed(Path(finders.find(name) or ""), url)))
        return self.files[url]


@cache
def hashed_name(name: str) -> str:
    """`dashboard/console.css` -> `dashboard/console.0123456789ab.css`; a name without a file stays as it is."""
    found = finders.find(name)
    if not found:
        return name
    path = Path(name)
    digest = hashlib.sha256(Path(found).read_bytes()).hexdigest()[:DIGEST_CHARS]
    return path.with_name(f"{path.stem}.{digest}{path.suffix}").as_posix()


def _compressed(path: Path, url: str) -> Path:
    copy = _folder() / hashlib.sha256(url.encode()).hexdigest() / path.name
    copy.parent.mkdir(exist_ok=True)
    shutil.copy2(path, copy)
    compressor = Compressor(quiet=True)
    if compressor.should_compress(path.name):
        list(compressor.compress(str(copy)))
    return copy


@cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="switchyard-static-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
