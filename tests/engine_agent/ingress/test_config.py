"""The text of haproxy.cfg, and the changes that need a reload."""

import re
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from engine_agent.ingress import config, headers
from engine_agent.ingress.certificates import Applications
from engine_agent.ingress.config import (
    HEAD_ROOM_BYTES,
    body_parser_structure_of,
    map_file,
    render,
    render_body_parser,
    structure_of,
)
from engine_agent.ingress.desired import EMPTY_DESIRED, desired_from
from engine_agent.ingress.settings import BODY_PARSERS, BodyParserTier, IngressSettings
from engine_agent.protocol.ingress_messages import Affinity, PoolAdapter, RoutingTable, Split
from engine_agent.protocol.states import PlainHttp
from tests.engine_agent.authority import FLEET
from tests.engine_agent.ingress.keyed import keyed
from tests.engine_agent.ingress.test_desired import CELL, POOL, TABLE, with_cell, with_pool

EVERYTHING = msgspec.structs.replace(
    TABLE,
    pools=(
        msgspec.structs.replace(
            POOL,
            cells=(msgspec.structs.replace(CELL, node="n-0a1b2c3d", version="7"),),
            spill=tuple(msgspec.structs.replace(target, ingress=f"i-{target.region}") for target in POOL.spill),
            affinity=Affinity(),
            adapters=(PoolAdapter("tuned", parent="chat", cells=("c-1-g3",)),),
            by_cache=True,
            request_limits="sequences=256;stops=8",
            continues=True,
        ),
    ),
    splits=(Split("any", {POOL.name: 1}),),
    keys=(keyed(tokens_per_min=6).entry,),
)
GOLDEN = Path(__file__).with_name("golden")
SETTINGS = IngressSettings("i-east", "east", Path("/var/lib/ingress"), port=8080)


def test_the_file_is_the_golden_one() -> None:
    draining = msgspec.structs.replace(CELL, cell="c-2", drain=True, address="::1")
    desired = desired_from(with_pool(cells=(CELL, draining)))
    assert render(desired, SETTINGS) == (GOLDEN / "haproxy.cfg").read_text()


def test_the_file_before_the_first_table_is_the_golden_one() -> None:
    assert render(EMPTY_DESIRED, SETTINGS) == (GOLDEN / "no_table.cfg").read_text()


def test_the_file_of_a_table_that_uses_everything_is_the_golden_one() -> None:
    assert render(desired_from(EVERYTHING, FLEET), SETTINGS) == (GOLDEN / "everything.cfg").read_text()


def test_with_certificates_for_applications_a_frontend_of_their_own_and_a_rule_are_all_that_is_new() -> None:
    desired = desired_from(EVERYTHING, FLEET)
    loopback = Applications({"api": "…", "wild": "…"}, PlainHttp.LOOPBACK)
    text = render(replace(desired, applications=loopback), SETTINGS)
    assert text == (GOLDEN / "applications.cfg").read_text()
    refusing = render(replace(desired, applications=replace(loopback, plain_http=PlainHttp.REFUSE)), SETTINGS)
    assert "lua.refuse_tls_required if !{ ssl_fc } !{ path /health /healthz }\n" in refusing
    new = set(text.splitlines()) - set((GOLDEN / "everything.cfg").read_text().splitlines())
    shared = ("  description", "  lua-load refuse.lua", "  set-var-fmt proc.refuse_tls_required")
    assert sorted(line.split()[0] for line in new if not line.startswith(shared)) == [
        *("#", "bind", "frontend", "http-request", "maxconn", "timeout")
    ]


def test_the_names_of_certificates_are_structure_and_what_is_in_them_is_not() -> None:
    def structure(**certificates: str) -> str:
        return structure_of(replace(desired_from(TABLE), applications=Applications(certificates)), SETTINGS)

    assert structure(a="x") == structure(a="y")
    assert len({structure(), structure(a="x"), structure(b="x"), structure(a="x", b="x"), structure(b="x", a="x")}) == 5


def test_what_a_table_does_not_use_costs_its_requests_no_rule() -> None:
    def rules(table: RoutingTable) -> int:
        frontend = (
            render(desired_from(table), SETTINGS).partition("frontend ingress")[2].partition("frontend parsed")[0]
        )
        return frontend.count("  http-request ")

    assert rules(msgspec.structs.replace(TABLE, hop_secrets=())) <= 43
    assert rules(EVERYTHING) > 70


def test_a_body_parser_is_asked_for_affinity_keys_only_where_they_are_of_use() -> None:
    asks = "http-request set-header X-Switchyard-Affinity wanted"
    sticky = msgspec.structs.replace(TABLE, splits=(Split("c", {POOL.name: 1}),))
    random = msgspec.structs.replace(TABLE, splits=(Split("c", {POOL.name: 1}, sticky=False),))
    for table, times in ((TABLE, 0), (random, 0), (sticky, 2), (with_pool(affinity=Affinity()), 2)):
        assert render(desired_from(table), SETTINGS).count(asks) == times, "once for each body parser, or never"


def test_without_an_access_log_only_failures_have_lines() -> None:
    quiet = "http-after-response set-log-level silent unless { status ge 400 }"
    for access_log, times in ((True, 0), (False, 1)):
        text = render(desired_from(EVERYTHING), replace(SETTINGS, access_log=access_log))
        assert text.partition("backend default")[0].count(quiet) == times
        assert text.count("log-format") == 1


def test_only_pools_limits_settings_and_what_is_in_use_are_structure() -> None:
    structure = structure_of(desired_from(TABLE), SETTINGS)
    same = [
        with_pool(cells=()),
        with_pool(spill=()),
        with_cell(drain=True, port=1),
        with_pool(fractions={"east": 1.0}),
        with_pool(models=("chat", "new")),
        msgspec.structs.replace(TABLE, revision=6),
        msgspec.structs.replace(TABLE, hop_secrets=("e" * 40,)),
    ]
    others = [
        with_pool(adapters=(PoolAdapter("tuned", parent="chat"),)),
        msgspec.structs.replace(TABLE, keys=(keyed().entry,)),
        msgspec.structs.replace(TABLE, keys_required=True),
        msgspec.structs.replace(TABLE, splits=(Split("c", {POOL.name: 1}),)),
        msgspec.structs.replace(TABLE, hop_secrets=()),
        with_pool(affinity=Affinity()),
        msgspec.structs.replace(TABLE, pools=()),
        msgspec.structs.replace(TABLE, keys=(keyed(tokens_per_min=6).entry,)),
        msgspec.structs.replace(TABLE, pools=(POOL, msgspec.structs.replace(POOL, name="b", models=("b",)))),
        msgspec.structs.replace(TABLE, max_body_bytes=1),
        msgspec.structs.replace(TABLE, retry_after_s=1),
        with_pool(serving_class="batch"),
        with_pool(request_limits="stops=8"),
    ]
    assert {structure_of(desired_from(table), SETTINGS) for table in same} == {structure}
    assert structure not in {structure_of(desired_from(table), SETTINGS) for table in others}
    assert structure_of(desired_from(TABLE), replace(SETTINGS, port=8081)) != structure


def test_keys_and_splits_and_bounds_change_in_place() -> None:
    same = [
        EVERYTHING,
        msgspec.structs.replace(EVERYTHING, keys=(keyed("0b0b0b0b", tokens_per_min=7, requests_per_min=6).entry,)),
        msgspec.structs.replace(EVERYTHING, keys_required=True),
        msgspec.structs.replace(EVERYTHING, splits=(Split("other", {POOL.name: 3}),)),
        msgspec.structs.replace(
            EVERYTHING,
            pools=(
                msgspec.structs.replace(
                    POOL,
                    cells=(),
                    affinity=Affinity(load_bound=2.0),
                    adapters=(PoolAdapter("a", parent="chat"),),
                    by_cache=True,
                    request_limits="sequences=256;stops=8",
                    continues=True,
                ),
            ),
        ),
    ]
    assert len({structure_of(desired_from(table), SETTINGS) for table in same}) == 1


def test_a_map_is_written_as_lines() -> None:
    assert map_file({"a": "1", "b": "two words"}) == "a 1\nb two words\n"


MIB = 1024 * 1024
BUFFER = re.compile(r"^  tune.bufsize (\d+)$", re.MULTILINE)


@pytest.mark.parametrize("tier", BODY_PARSERS, ids=lambda tier: tier.name)
def test_the_file_of_a_body_parser_is_the_golden_one(tier: BodyParserTier) -> None:
    assert render_body_parser(desired_from(TABLE), SETTINGS, tier) == (GOLDEN / f"{tier.name}.cfg").read_text()


@pytest.mark.parametrize("tier", BODY_PARSERS, ids=lambda tier: tier.name)
def test_only_limits_concern_a_reader(tier: BodyParserTier) -> None:
    structure = body_parser_structure_of(desired_from(TABLE), SETTINGS, tier)
    same = [with_pool(cells=()), with_pool(models=("new",)), msgspec.structs.replace(TABLE, pools=())]
    # Otherwise the serving HAProxy would lack the parser's results until the parser has reloaded.
    same += [msgspec.structs.replace(TABLE, hop_secrets=()), msgspec.structs.replace(TABLE, splits=(), keys=())]
    others = [msgspec.structs.replace(TABLE, max_body_bytes=1), msgspec.structs.replace(TABLE, retry_after_s=1)]
    assert {body_parser_structure_of(desired_from(table), SETTINGS, tier) for table in same} == {structure}
    assert structure not in {body_parser_structure_of(desired_from(table), SETTINGS, tier) for table in others}
    assert body_parser_structure_of(desired_from(TABLE), replace(SETTINGS, replay_bytes=1), tier) != structure


def test_a_body_parser_has_buffers_for_its_own_bodies_and_never_for_more_than_the_table_allows() -> None:
    def bodies(max_body_bytes: int) -> list[int]:
        desired = desired_from(msgspec.structs.replace(TABLE, max_body_bytes=max_body_bytes))
        texts = [render_body_parser(desired, SETTINGS, tier) for tier in BODY_PARSERS]
        return [int(BUFFER.search(text)[1]) - HEAD_ROOM_BYTES for text in texts]  # type: ignore[index]

    assert bodies(4 * MIB) == [MIB // 4, 4 * MIB]
    assert bodies(MIB // 8) == [MIB // 8, MIB // 8]


def test_the_body_parsers_leave_most_connections_to_those_from_outside() -> None:
    assert SETTINGS.max_connections == 4000
    assert [SETTINGS.max_requests_at(tier) for tier in BODY_PARSERS] == [1000, 500]
    assert SETTINGS.max_outside_connections == 2500


def test_the_template_names_only_known_headers() -> None:
    named = set(
        re.findall(r"X-Switchyard-[A-Za-z-]+[a-z]", Path(config.__file__).with_name(config.TEMPLATE).read_text())
    )
    known = {value for name, value in vars(headers).items() if name.isupper() and isinstance(value, str)}
    assert named <= known | {"X-Switchyard-Cache"}


def test_no_error_text_has_a_single_quote_which_would_end_it() -> None:
    for tier in (None, *BODY_PARSERS):
        desired = desired_from(EVERYTHING, FLEET)
        text = render_body_parser(desired, SETTINGS, tier) if tier else render(desired, SETTINGS)
        for line in text.splitlines():
            if "http-error" in line or "return status" in line or "proc.refuse_" in line:
                assert line.count("'") % 2 == 0, line
                assert re.search(r"[A-Za-z]'[A-Za-z]", line) is None, line
