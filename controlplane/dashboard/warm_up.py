"""Prepares a web process for its first visits, because each process would otherwise make its first users wait: the
templates of a page are compiled, URLs are indexed and Plotly is imported when they are first needed.

It uses no database, and runs in a thread next to the first requests."""

import logging
import threading
from collections.abc import Iterator
from time import sleep

from django.conf import settings
from django.template import loader
from django.urls import reverse
from django.utils.module_loading import import_string

from controlplane.dashboard.charts import prepare_charts

GIVES_WAY_S = 0.002
"""Pause after each template, in which requests run."""

log = logging.getLogger(__name__)


def start_warming() -> threading.Thread:
    """Begins to warm this process up. The thread is a daemon: a process that ends does not wait for it."""
    thread = threading.Thread(target=_warm_up_or_log, name="warm-up", daemon=True)
    thread.start()
    return thread


def _warm_up_or_log() -> None:
    try:
        warm_up(GIVES_WAY_S)
    except Exception:
        log.exception("the warm-up failed; first visits of pages take longer")


def warm_up(pause_s: float = 0.0) -> int:
    """Makes what all first visits need, the most common first. Returns the number of compiled templates."""
    reverse("overview")
    import_string(settings.MESSAGE_STORAGE)
    for processor in settings.TEMPLATES[0]["OPTIONS"]["context_processors"]:
        import_string(processor)
    compiled = 0
    for name in template_names():
        loader.get_template(name)  # Django keeps it
        compiled += 1
        sleep(pause_s)
    prepare_charts()
    return compiled


def template_names() -> Iterator[str]:
    """Templates of this repository's pages, those of the dashboard first, because every page extends some of them."""
    folder = settings.BASE_DIR / "templates"
    names = (str(path.relative_to(folder)) for path in folder.rglob("*.html"))
    yield from sorted(names, key=lambda name: (not name.startswith("dashboard/"), name))
