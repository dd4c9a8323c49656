"""The text of haproxy.cfg, whole, and what of it a reload is for."""

from dataclasses import replace
from pathlib import Path

import msgspec

from engine_agent.ingress.applications import Applications
from engine_agent.ingress.config import map_file, render, structure_of
from engine_agent.ingress.desired import EMPTY_DESIRED, desired_from
from engine_agent.ingress.settings import IngressSettings
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
            cells=(msgspec.structs.replace(CELL, node="n-0a1b2c3d"),),
            spill=tuple(msgspec.structs.replace(target, ingress=f"i-{target.region}") for target in POOL.spill),
            affinity=Affinity(),
            adapters=(PoolAdapter("tuned", parent="chat", cells=("c-1-g3",)),),
            by_cache=True,
            request_limits="sequences=256;stops=8",
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

    assert rules(msgspec.structs.replace(TABLE, hop_secrets=())) <= 42
    assert rules(EVERYTHING) > 70


def test_a_body_parser_is_asked_for_affinity_keys_only_where_they_are_of_use() -> None:
    asks = "http-request set-header X-Switchyard-Affinity wanted"
    sticky = msgspec.structs.replace(TABLE, splits=(Split("c", {POOL.name: 1}),))
    random = msgspec.structs.replace(TABLE, splits=(Split("c", {POOL.name: 1}, sticky=False),))
    for table, times in ((TABLE, 0), (random, 0), (sticky, 2), (with_pool(affinity=Affinity()), 2)):
        assert render(desired_from(table), SETTINGS).count(asks) == times, "once for each body parser, or never"


def test_without_an_access_log_only_failures_have_lines() -> None:
    quiet = "http-after-response set-log-level silent unless { status ge 500 }"
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
                ),
            ),
        ),
    ]
    assert len({structure_of(desired_from(table), SETTINGS) for table in same}) == 1


def test_a_map_is_written_as_lines() -> None:
    assert map_file({"a": "1", "b": "two words"}) == "a 1\nb two words\n"
