"""What one request or command has changed so far, noted while it runs, so that its audit record can say so.

Whoever writes need not know of it. It stores nothing; what a savepoint takes back, it forgets.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

Noted = dict[str, Any]
V = TypeVar("V", bound=Callable[..., Any])


@dataclass
class Trail:
    """`events`: event rows written. `rows`: rows written, with what changed. `said`: what signals told of (a login).

    `objects`: what it was about, as `noun/key`, in the order in which that came up.
    """

    events: list[Noted] = field(default_factory=list)
    rows: list[Noted] = field(default_factory=list)
    said: Noted = field(default_factory=dict)
    objects: list[str] = field(default_factory=list)

    @property
    def changed(self) -> bool:
        """Whether anything was written that is still there."""
        return bool(self.events or self.rows or self.said)

    def mark(self) -> tuple[int, int, int]:
        """Where it is now, for `take_back`."""
        return len(self.events), len(self.rows), len(self.objects)

    def take_back(self, mark: tuple[int, int, int]) -> None:
        """Forget what came after the mark."""
        events, rows, objects = mark
        del self.events[events:], self.rows[rows:], self.objects[objects:]

    def about(self, noun: str, key: object) -> None:
        """Note one of the things that it is about."""
        name = f"{noun}/{key}"
        if key not in {"", None} and name not in self.objects:
            self.objects.append(name)


_current: ContextVar[Trail | None] = ContextVar("switchyard_trail", default=None)


def trail() -> Trail | None:
    """That of the request or command that runs now; None where nobody keeps one, as in the worker's passes."""
    return _current.get()


@contextmanager
def keep_trail() -> Iterator[Trail]:
    """Keep one for what runs inside."""
    kept = Trail()
    token = _current.set(kept)
    try:
        yield kept
    finally:
        _current.reset(token)


def not_audited(why: str) -> Callable[[V], V]:
    """Declares that a view's unsafe requests change nothing of the control plane: no transaction, no record.

    For what streams or waits for others; a view that merely writes nothing needs no declaration.
    """

    def declare(view: V) -> V:
        view.not_audited = why  # type: ignore[attr-defined]  # read at the border, by name
        return view

    return declare
