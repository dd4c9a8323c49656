"""A web process has what first visits need before its first visit. Without the mark `django_db` the first query would
fail."""

import sys

import pytest
from django.template import loader

from controlplane.dashboard import warm_up


def test_a_warm_process_has_all_templates_and_the_library_of_charts() -> None:
    compiled = warm_up.warm_up()
    assert compiled == len(list(warm_up.template_names())) > 200
    one, again = (vars(loader.get_template("dashboard/page.html"))["template"] for _ in range(2))
    assert one is again, "it is compiled once"
    assert "plotly.graph_objects" in sys.modules


def test_a_failed_warm_up_is_logged_and_harms_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> None:
        raise OSError("no such file")

    monkeypatch.setattr(warm_up, "template_names", fails)
    warm_up.start_warming().join()
    assert "first visits of pages take longer" in caplog.text
