"""What tests need not pay for: slow password hashes, and static files that every test's client would look for anew."""

from typing import Any

from django.contrib.auth.hashers import PBKDF2PasswordHasher
from whitenoise.middleware import WhiteNoiseMiddleware


def quicken() -> None:
    """Quicken this process, not those that it starts."""
    # The same algorithm as in production, so that a web process which a test starts knows these passwords.
    PBKDF2PasswordHasher.iterations = 1
    _find_static_files_once()


def _find_static_files_once() -> None:
    """A client loads the middleware, and that reads the state of all files: longer than most pages take to answer."""
    find = WhiteNoiseMiddleware.add_files_from_finders
    found: dict[str, Any] = {}

    def find_or_remember(middleware: WhiteNoiseMiddleware) -> None:
        if not found:
            find(middleware)
            found.update(middleware.files)
        middleware.files.update(found)

    WhiteNoiseMiddleware.add_files_from_finders = find_or_remember
