"""Pages made of fragments: the server renders them with the page, later only the one that a browser refetches. A
fragment is fetched from its page's URL, named by the `HX-Target` header, so filters and permissions are those of the
page. Fragments never write."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Protocol, TypeVar
from urllib.parse import parse_qsl, urlsplit

from django.contrib.auth.models import AnonymousUser
from django.contrib.auth.views import redirect_to_login
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase, QueryDict
from django.shortcuts import render
from django.utils.cache import patch_vary_headers
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from kernel import clock
from kernel.access import Access, Known, Role, access_of, require
from kernel.refusals import InvalidInput
from kernel.time_ranges import OF_LOAD, Ranges, TimeRange, last, parse_range

MAX_PAGE_DIGITS = 6
"""Maximum page number; larger ones are ignored."""
ALL_PARTS = "all"
"""Value of the parameter `parts` with which a page has its deferred fragments as well."""
Context = dict[str, Any]
T = TypeVar("T")
Load = Callable[["PageRequest"], object]
"""Loads the data of one fragment; the result is `body` in its template."""


def found_or_404(row: T | None, name: str) -> T:
    """Raises Http404 with a sentence about `name`, such as `cell 'c-1'`, if there is no row."""
    if row is None:
        raise Http404(f"There is no {name}.")
    return row


@dataclass(frozen=True, slots=True)
class Caller:
    """The user who opened the page, for fragments that differ by user."""

    user: Known = field(default_factory=AnonymousUser)
    access: Access = field(default_factory=Access)
    session_key: str = ""


@dataclass(frozen=True, slots=True)
class PageRequest:
    """A page request: `key` is the ID of its object ("" on lists), `filters` the query string."""

    key: str
    filters: QueryDict
    now: datetime
    caller: Caller = field(default_factory=Caller)
    ranges: Ranges = OF_LOAD
    _read: dict[Load, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    def once(self, load: Callable[["PageRequest"], T]) -> T:
        """The result of `load`, cached for all fragments of this request."""
        if load not in self._read:
            self._read[load] = load(self)
        result: T = self._read[load]
        return result

    def text(self, name: str) -> str:
        """A filter's value without surrounding spaces and NUL, which PostgreSQL rejects; "" if it is not set."""
        return str(self.filters.get(name, "")).replace("\0", "").strip()

    @property
    def span(self) -> TimeRange:
        """The time range in the URL, the page's default if it is invalid."""
        return self.once(_read_range)[0]

    @property
    def page(self) -> int:
        """The page number in the URL, from 1; the first page if it is invalid."""
        return self.page_of("")

    def page_of(self, prefix: str) -> int:
        """The page of the list whose parameters have this prefix."""
        text = self.text(f"{prefix}page")
        return max(1, int(text)) if text.isascii() and text.isdigit() and len(text) < MAX_PAGE_DIGITS else 1


def _read_range(request: PageRequest) -> tuple[TimeRange, str]:
    """The range, and why the one in the URL is invalid."""
    name, since, until = (request.text(part) for part in ("range", "from", "to"))
    try:
        return parse_range(name=name, since=since, until=until, ranges=request.ranges, now=request.now), ""
    except InvalidInput as refusal:
        return last(request.ranges.default, request.now), str(refusal)


@dataclass(frozen=True, slots=True)
class RangeControl:
    """The control in the head of a page. `since` and `until` are the texts in the URL, valid or not."""

    span: TimeRange
    names: tuple[str, ...]
    since: str
    until: str
    error: str

    @property
    def parts(self) -> list[tuple[str, str]]:
        """The range as fields of a form."""
        return parse_qsl(self.span.query)

    @property
    def default_since(self) -> str:
        return f"{self.span.start:%Y-%m-%dT%H:%M}Z"

    @property
    def default_until(self) -> str:
        return f"{self.span.end:%Y-%m-%dT%H:%M}Z"


@dataclass(frozen=True, slots=True)
class Choice:
    """One list of a filter: values with labels, and the selected value."""

    name: str
    label: str
    options: tuple[tuple[str, str], ...]
    chosen: str


@dataclass(frozen=True, slots=True)
class Filter:
    """A page's filter, kept in its URL. `text_name` is the parameter of the text box that `f` focuses; "": none.
    `kept`: other parameters of the URL that stay, without an input."""

    text_label: str
    text_name: str
    text: str
    choices: tuple[Choice, ...] = ()
    kept: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Fragment:
    """One part of a page that refreshes separately. `name` is its element's ID.

    `topics` are the hints that make a browser refetch it: `cells`, or `cells:{key}` for hints about the page's own
    object. `load` may raise Http404.

    `is_deferred`: it is below the first screen, so the page has only its title. The browser fetches it when it comes
    near the window (static/dashboard/live.js). `?parts=all` renders the page with all its parts."""

    name: str
    title: str
    topics: tuple[str, ...]
    template: str
    load: Load
    is_deferred: bool = False


def deferred(*fragments: Fragment) -> tuple[Fragment, ...]:
    """The same fragments, deferred: those below the first screen."""
    return tuple(replace(fragment, is_deferred=True) for fragment in fragments)


@dataclass(frozen=True, slots=True)
class Past:
    """A page as it was at the time of `?at=`: `fragments` replace its own, below `banner`."""

    banner: Fragment
    fragments: tuple[Fragment, ...]


class Listed(Protocol):
    """A list of a page (controlplane.dashboard.lists). `prefix`: its parameters in the URL begin with it."""

    @property
    def prefix(self) -> str: ...

    def export(self, request: PageRequest) -> HttpResponseBase: ...


@dataclass(frozen=True, slots=True)
class Page:
    """One page. `section` is its navigation entry; `narrow`, if any, loads the choices of its filter. `actions`, if
    any, loads the `ActionMenu` in the head of its first fragment. `lists`: those that it offers as CSV
    (`?format=csv&list=PREFIX`, by default the first). `charts`: it has charts, so it loads Plotly. `ranges`: time
    ranges that it offers, if any. `role`: the role that may open it. `past`: how it shows itself as it was; without
    it, `?at=` shows the present with a note.

    The filter applies to the first fragment. On a page about one object, the first fragment shows the title."""

    section: str
    title: str
    fragments: tuple[Fragment, ...]
    narrow: Callable[[PageRequest], Filter] | None = None
    actions: Load | None = None
    lists: tuple[Listed, ...] = ()
    charts: bool = False
    ranges: Ranges | None = None
    role: Role = Role.VIEWER
    past: Past | None = None


View = Callable[..., HttpResponseBase]


def page_view(page: Page, shell: Fragment) -> View:
    """The view of a page. `shell` is the fragment that every page has outside its own content."""

    @never_cache
    @require_safe
    def view(request: HttpRequest, key: str = "") -> HttpResponseBase:
        if not request.user.is_authenticated:
            return _to_login(request)
        require(request, page.role)
        caller = Caller(request.user, access_of(request), request.session.session_key or "")
        page_request = PageRequest(key, request.GET, clock.now(), caller, page.ranges or OF_LOAD)
        if page.lists and request.GET.get("format") == "csv":
            chosen = next((each for each in page.lists if each.prefix == request.GET.get("list", "")), page.lists[0])
            if key:
                page_request.once(page.fragments[0].load)  # raises Http404 if the object does not exist
            return _only_now(page_request) or chosen.export(page_request)
        wanted = request.headers.get("HX-Target", "")
        shown = _as_it_was(page, page_request)
        one = next(
            (fragment for fragment in (shell, *_banner(shown), *shown.fragments) if fragment.name == wanted), None
        )
        response = _fragment(request, shown, one, page_request) if one else _page(request, shown, shell, page_request)
        patch_vary_headers(response, ["HX-Target"])
        return response

    view.page = page  # type: ignore[attr-defined]  # the search finds pages by their titles
    return view


def _only_now(request: PageRequest) -> HttpResponse | None:
    """Why there is no export, if the URL has a time: recordings lack most columns of the lists."""
    if not request.text("at"):
        return None
    text = "A CSV file has the present only. Leave out at= to download it; the page itself shows what was recorded.\n"
    return HttpResponse(text, status=400, content_type="text/plain; charset=utf-8")


def _as_it_was(page: Page, request: PageRequest) -> Page:
    """The page with the fragments of its past, if the URL has a time and it has a past; else without a past."""
    if page.past is not None and request.text("at"):
        return replace(page, fragments=page.past.fragments, actions=None, charts=False, ranges=None)
    return replace(page, past=None)


def _banner(page: Page) -> tuple[Fragment, ...]:
    return (page.past.banner,) if page.past else ()


def _page(request: HttpRequest, page: Page, shell: Fragment, page_request: PageRequest) -> HttpResponse:
    return render(request, "dashboard/page.html", shell_context(request, page, shell, page_request))


def shell_context(request: HttpRequest, page: Page, shell: Fragment, page_request: PageRequest) -> Context:
    """The context of `dashboard/page.html`."""
    has_all = page_request.text("parts") == ALL_PARTS
    return {
        "page": page,
        "key": page_request.key,
        "now": page_request.now,
        "filter": page.narrow(page_request) if page.narrow else None,
        "range": _range_control(page.ranges, page_request) if page.ranges else None,
        "banner": [_fragment_context(request, page, fragment, page_request) for fragment in _banner(page)],
        "parts": [
            _fragment_context(request, page, fragment, page_request, is_later=fragment.is_deferred and not has_all)
            for fragment in page.fragments
        ],
        "shell": _fragment_context(request, page, shell, page_request),
    }


def _range_control(ranges: Ranges, request: PageRequest) -> RangeControl:
    span, error = request.once(_read_range)
    return RangeControl(span, ranges.names, request.text("from"), request.text("to"), error)


def _fragment(request: HttpRequest, page: Page, fragment: Fragment, page_request: PageRequest) -> HttpResponse:
    context = {
        "page": page,
        "key": page_request.key,
        "part": _fragment_context(request, page, fragment, page_request),
        "now": page_request.now,
    }
    return render(request, "dashboard/fragment.html", context)


def _fragment_context(
    request: HttpRequest, page: Page, fragment: Fragment, page_request: PageRequest, *, is_later: bool = False
) -> Context:
    menu = page.actions if fragment in page.fragments[:1] else None
    return {
        "fragment": fragment,
        "is_later": is_later,
        "topics": "" if is_later else " ".join(topic.format(key=page_request.key) for topic in fragment.topics),
        "url": request.get_full_path(),
        "as_of_ms": int(page_request.now.timestamp() * 1000),
        "body": None if is_later else page_request.once(fragment.load),
        "menu": menu(page_request) if menu else None,
    }


def _to_login(request: HttpRequest) -> HttpResponse:
    """A whole page redirects; a fragment must not, or the login form would appear inside the page."""
    if "HX-Request" not in request.headers:
        return redirect_to_login(request.get_full_path())
    page = urlsplit(request.headers.get("HX-Current-URL", ""))
    back = f"{page.path or '/'}?{page.query}" if page.query else page.path or "/"
    return HttpResponse(status=401, headers={"HX-Redirect": redirect_to_login(back).url})
