"""Times and numbers as people read them."""

from datetime import UTC, datetime, timedelta

import pytest
from django.template import Context, Template

from controlplane.dashboard.templatetags.switchyard import (
    NOTHING,
    age_text,
    count,
    counters,
    distance,
    gib,
    ms,
    one_decimal,
    percent,
    plain,
    rate,
    sentence,
    share,
    short_digest,
)

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("age_s", "expected"),
    [(-3, "0 s"), (0.9, "0 s"), (119, "119 s"), (120, "2 min"), (7199, "119 min"), (7200, "2 h"), (172_800, "2 d")],
)
def test_an_age_is_in_the_largest_unit_of_which_there_are_two(age_s: float, expected: str) -> None:
    assert age_text(age_s).replace("\u202f", " ") == expected


@pytest.mark.parametrize(
    ("rendered", "expected"),
    [
        (count(None), NOTHING),
        (count(""), NOTHING),
        (count(1234567), "1 234 567"),
        (rate(0.0), "0"),
        (rate(9.44), "9.4"),
        (rate(1234.5), "1 234"),
        (ms(4.04), "4.0 ms"),
        (ms(412.6), "413 ms"),
        (ms(12_400), "12.4 s"),
        (percent(0.0), "0 %"),
        (percent(0.024), "0.02 %"),
        (percent(12.3), "12 %"),
        (share(None), NOTHING),
        (share(0.4), "0.4 %"),
        (share(62.6), "63 %"),
        (one_decimal(""), NOTHING),
        (one_decimal(24), "24.0"),
        (one_decimal(-0.01), "0.0"),
        (gib(None), NOTHING),
        (gib(0), "0 GiB"),
        (gib(782486784), "0.7 GiB"),
        (gib(80 * 2**30), "80 GiB"),
        (counters({}), NOTHING),
        (counters({"ecc": 0}), "none"),
        (counters({"ecc": 4, "rows": 0, "xid": 12000}), "ecc 4, xid 12 000"),
        (short_digest("sha256:0123456789abcdef"), "0123456789ab"),
        (short_digest(""), NOTHING),
        (plain("as it is"), "as it is"),
        (plain({"ok": True, "rate": None}), '{"ok": true, "rate": null}'),
        (distance(0), "same network node"),
        (distance(2), "2 levels apart"),
        (distance(None), "topology unknown"),
    ],
)
def test_numbers_are_short_and_nothing_is_a_dash(rendered: str, expected: str) -> None:
    assert rendered.replace("\u202f", " ") == expected


def test_a_clock_time_carries_its_age_and_the_whole_time() -> None:
    template = Template("{% load switchyard %}{% ago when %}")
    html = template.render(Context({"now": NOW, "when": NOW - timedelta(minutes=5)}))
    assert 'title="5\u202fmin ago, 2026-11-21 11:55:00 UTC"' in html
    assert 'datetime="2026-11-21T11:55:00Z"' in html
    assert html.endswith(">11:55:00</time>")


@pytest.mark.parametrize(
    ("ago", "clock", "title"),
    [
        (timedelta(hours=13), "11-20 23:00", "13\u202fh ago"),
        (timedelta(days=400), "2025-10-17 12:00", "400\u202fd ago"),
        (-timedelta(minutes=3), "12:03:00", "in 3\u202fmin"),
    ],
)
def test_a_clock_time_leaves_out_what_it_shares_with_now(ago: timedelta, clock: str, title: str) -> None:
    html = Template("{% load switchyard %}{% ago when %}").render(Context({"now": NOW, "when": NOW - ago}))
    assert html.endswith(f">{clock}</time>")
    assert f'title="{title}, ' in html


def test_a_time_that_may_be_far_away_is_written_in_full() -> None:
    context = Context({"now": NOW, "when": NOW + timedelta(days=40)})
    html = Template("{% load switchyard %}{% moment when %}").render(context)
    assert html.endswith('title="in 40\u202fd" data-age="at">2026-12-31 12:00 UTC</time>')


def test_a_state_is_a_glyph_and_a_word_and_never_a_colour_alone() -> None:
    html = Template('{% load switchyard %}{% state "rolling_back" "warn" %}').render(Context())
    assert "#glyph-warn" in html
    assert "rolling back" in html


def test_a_name_cannot_bring_markup() -> None:
    html = Template("{% load switchyard %}{% state word 'ok' %}").render(Context({"word": "<b>"}))
    assert "<b>" not in html


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("tenant: it has a blank", "Tenant: it has a blank."),
        ("type a to confirm.", "Type a to confirm."),
        ("toy@1 is draft", "toy@1 is draft."),
    ],
)
def test_a_sentence_has_a_capital_unless_it_begins_with_an_identifier(text: str, shown: str) -> None:
    assert sentence(text) == shown
