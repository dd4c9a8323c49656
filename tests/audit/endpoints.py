"""Every unsafe endpoint of the URL configuration, found there, so that a new one cannot be forgotten."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from django.urls import NoReverseMatch, URLPattern, URLResolver, get_resolver, reverse

UNSAFE = ("post", "put", "patch", "delete")
KEYS = ("1", "x", "x@1", "x@1.1")


@dataclass(frozen=True)
class Endpoint:
    """`view` is what Django calls."""

    method: str
    path: str
    view: Any

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


def unsafe_endpoints() -> list[Endpoint]:
    """All of them, in the order of their paths."""
    found = {str(endpoint): endpoint for endpoint in _below(get_resolver().url_patterns, ())}
    return [found[name] for name in sorted(found, key=lambda name: name.split(" ")[::-1])]


def _below(patterns: list[Any], spaces: tuple[str, ...]) -> Iterator[Endpoint]:
    for pattern in patterns:
        if isinstance(pattern, URLResolver):
            yield from _below(pattern.url_patterns, (*spaces, pattern.namespace) if pattern.namespace else spaces)
        elif isinstance(pattern, URLPattern) and pattern.name:
            for method in _methods(pattern.callback):
                if path := _path(pattern, spaces):
                    yield Endpoint(method.upper(), path, pattern.callback)


def _methods(view: Any) -> list[str]:
    if hasattr(view, "actions"):  # a view set of the API
        return [method for method in view.actions if method in UNSAFE]
    if (kind := getattr(view, "view_class", None) or getattr(view, "cls", None)) is not None:
        return [method for method in UNSAFE if hasattr(kind, method)]
    return ["post"]


def _path(pattern: URLPattern, spaces: tuple[str, ...]) -> str:
    names = list(pattern.pattern.regex.groupindex)
    for key in KEYS:
        try:
            return reverse(":".join((*spaces, str(pattern.name))), kwargs=dict.fromkeys(names, key))
        except NoReverseMatch:
            continue
    return ""
