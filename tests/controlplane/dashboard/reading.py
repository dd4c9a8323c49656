from html.parser import HTMLParser

from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from controlplane.dashboard.fragments import ALL_PARTS


class Reader(HTMLParser):
    """Remembers ids, links and anything inline that the content security policy would refuse."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.fragments: list[str] = []
        self.inline: list[str] = []
        self._in_script = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.ids += [values["id"] or ""] if "id" in values else []
        self.fragments += [values["id"] or ""] if "data-topics" in values else []
        self.inline += [name for name in values if name == "style" or name.startswith(("on", "hx-on"))]
        self.inline += [tag] if tag == "style" or (tag == "script" and not values.get("src")) else []


def whole(url: str) -> str:
    """A page with its deferred parts."""
    return f"{url}{'&' if '?' in url else '?'}parts={ALL_PARTS}"


def queries(client: Client, url: str) -> int:
    """Number of queries of a page with all its parts."""
    with CaptureQueriesContext(connection) as captured:
        assert client.get(whole(url)).status_code == 200
    return len(captured)
