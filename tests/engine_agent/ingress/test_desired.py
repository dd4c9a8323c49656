"""A routing table becomes servers and maps, or is refused with the reason."""

import json
from dataclasses import replace

import msgspec
import pytest

from engine_agent.ingress.bad_table import BadTable
from engine_agent.ingress.desired import PoolBackends, Server, desired_from
from engine_agent.ingress.routing_maps import CONTINUED_MAP, LISTING_MAP, MODELS_MAP, SHARES_MAP
from engine_agent.protocol.ingress_messages import CellEndpoint, Pool, RoutingTable, SpillTarget, Split
from engine_agent.protocol.states import ServingClass

CELL = CellEndpoint("c-1", 3, "127.0.0.1", 9000, max_connections=8)
POOL = Pool(
    name="chat",
    models=("org/chat", "chat"),
    serving_class="near_realtime",
    cells=(CELL,),
    spill=(SpillTarget("west", "10.0.0.2", 8080), SpillTarget("north", "::1", 8080)),
    fractions={"east": 0.7, "west": 0.3},
)
TABLE = RoutingTable(revision=5, region="east", pools=(POOL,), hop_secrets=("f" * 40,))


def with_pool(**changes: object) -> RoutingTable:
    return msgspec.structs.replace(TABLE, pools=(msgspec.structs.replace(POOL, **changes),))


def with_cell(**changes: object) -> RoutingTable:
    return with_pool(cells=(msgspec.structs.replace(CELL, **changes),))


def test_cells_and_other_regions_become_servers() -> None:
    desired = desired_from(TABLE)
    assert desired.pools == (PoolBackends("chat", ServingClass.NEAR_REALTIME, "chat"),)
    assert desired.servers == (
        Server("pool.chat", "c-1-g3", "127.0.0.1", 9000, 100, max_connections=8, cell="c-1"),
        Server("spill.chat", "north.standby", "::1", 8080, 256, backup=True),
        Server("spill.chat", "west", "10.0.0.2", 8080, 256),
    )


def test_a_cell_weighs_what_it_runs_at_once_beside_the_largest_of_its_pool() -> None:
    limits = {"c-1": 32, "c-2": 8, "c-3": 1, "c-4": 32}
    cells = [msgspec.structs.replace(CELL, cell=name, max_connections=most) for name, most in limits.items()]
    desired = desired_from(with_pool(cells=tuple(cells)))
    weights = {server.cell: server.weight for server in desired.servers if server.cell}
    assert weights == {"c-1": 100, "c-2": 25, "c-3": 3, "c-4": 100}
    huge = desired_from(with_pool(cells=(*cells, msgspec.structs.replace(CELL, cell="c-5", max_connections=10_000))))
    assert min(server.weight for server in huge.servers if server.cell) == 1, "0 would take no requests at all"


def test_models_shares_and_the_listing_become_maps() -> None:
    maps = desired_from(TABLE).maps
    assert maps[MODELS_MAP] == {"org/chat": "pool.chat", "chat": "pool.chat"}
    assert maps[SHARES_MAP] == {"pool.chat": "300"}
    assert [model["id"] for model in json.loads(maps[LISTING_MAP]["all"])["data"]] == ["chat", "org/chat"]


def test_a_pool_that_continues_names_the_cells_of_each_version() -> None:
    versions = {"c-1": "7", "c-2": "8", "c-3": "7", "c-4": "not one", "c-5": ""}
    cells = tuple(msgspec.structs.replace(CELL, cell=cell, version=version) for cell, version in versions.items())
    maps = desired_from(with_pool(cells=cells, continues=True)).maps
    assert maps[CONTINUED_MAP] == {
        "org/chat": "1",
        "chat": "1",
        "=c-1-g3": "7",
        "=c-2-g3": "8",
        "=c-3-g3": "7",
        "pool.chat/7": "/c-1-g3/c-3-g3",
        "pool.chat/8": "/c-2-g3",
    }
    assert CONTINUED_MAP not in desired_from(with_pool(cells=cells)).maps


def test_a_split_continues_if_one_of_its_pools_does() -> None:
    other = msgspec.structs.replace(POOL, name="other", models=("other",), continues=True)
    table = msgspec.structs.replace(TABLE, pools=(POOL, other), splits=(Split("any", {"chat": 1, "other": 1}),))
    assert {"any", "other"} == {name for name in desired_from(table).maps[CONTINUED_MAP] if name.isalpha()}


def test_regions_share_by_weight_and_the_home_region_is_no_target() -> None:
    spill = (*POOL.spill, SpillTarget("east", "127.0.0.1", 8080))
    desired = desired_from(with_pool(spill=spill, fractions={"east": 0.0, "west": 0.25, "north": 0.75}))
    assert {server.name: server.weight for server in desired.servers if not server.cell} == {"north": 256, "west": 85}
    assert desired.maps[SHARES_MAP] == {"pool.chat": "1000"}


@pytest.mark.parametrize(
    ("fractions", "share"),
    [({}, "0"), ({"east": 1.0}, "0"), ({"mars": 1.0}, "0"), ({"east": 0.999, "west": 0.001}, "1")],
)
def test_what_no_region_here_can_serve_stays(fractions: dict[str, float], share: str) -> None:
    assert desired_from(with_pool(fractions=fractions)).maps[SHARES_MAP] == {"pool.chat": share}


def test_the_order_of_a_table_does_not_matter() -> None:
    other = msgspec.structs.replace(POOL, name="a", models=("a",))
    one = msgspec.structs.replace(TABLE, pools=(POOL, other))
    two = msgspec.structs.replace(TABLE, pools=(other, POOL))
    assert desired_from(one) == desired_from(two)


BAD = [
    (with_pool(fractions={"east": 0.7}), "fractions of pool chat sum to 0.7, not to 1"),
    (with_pool(fractions={"east": 1.5, "west": -0.5}), "fractions of pool chat must be between 0 and 1"),
    (with_pool(name="a b"), "pool 'a b': a name is 1 to 80 letters"),
    (with_pool(models=()), "pool chat serves no model"),
    (with_pool(models=("a b",)), "model 'a b': only letters"),
    (with_pool(models=("chat", "chat")), "model chat is listed twice"),
    (with_pool(serving_class="slow"), "serving class 'slow' of pool chat is none of realtime, near_realtime, batch"),
    (with_pool(cells=(CELL, CELL)), "cell of pool chat c-1-g3 is listed twice"),
    (with_pool(spill=(POOL.spill[0], POOL.spill[0])), "spill region of pool chat west is listed twice"),
    (msgspec.structs.replace(TABLE, pools=(POOL, POOL)), "pool chat is listed twice"),
    (msgspec.structs.replace(TABLE, max_body_bytes=0), "max_body_bytes and retry_after_s must be positive"),
]


@pytest.mark.parametrize(("table", "said"), BAD, ids=[said for _, said in BAD])
def test_a_table_that_cannot_be_meant_is_refused_by_name(table: RoutingTable, said: str) -> None:
    with pytest.raises(BadTable) as caught:
        desired_from(table)
    assert str(caught.value).startswith(said)


def test_two_generations_of_a_cell_are_two_servers() -> None:
    newer = msgspec.structs.replace(CELL, generation=4, port=9100)
    desired = desired_from(with_pool(cells=(msgspec.structs.replace(CELL, drain=True), newer)))
    cells = [server for server in desired.servers if server.cell]
    assert cells == [
        replace(cells[0], name="c-1-g3", drain=True),
        replace(cells[0], name="c-1-g4", port=9100, drain=False),
    ]


BAD_ROWS = [
    (with_cell(address="localhost"), "address of cell c-1 must be an IP address, not 'localhost'"),
    (with_cell(port=0), "port of cell c-1 must be between 1 and 65535, not 0"),
    (with_cell(max_connections=0), "max_connections of cell c-1 must be positive, not 0"),
    (with_cell(cell="c;1"), "cell 'c;1': a name is"),
]


@pytest.mark.parametrize(("table", "said"), BAD_ROWS, ids=[said for _, said in BAD_ROWS])
def test_a_cell_that_nobody_could_connect_to_costs_itself_alone(table: RoutingTable, said: str) -> None:
    (pool,) = table.pools
    desired = desired_from(msgspec.structs.replace(table, pools=(with_cells(pool, CELL, *pool.cells),)))
    alone = desired_from(TABLE)
    assert desired.servers == alone.servers
    assert desired.maps == alone.maps
    (reason,) = desired.left_out
    assert reason.startswith(said)


def with_cells(pool: Pool, *cells: CellEndpoint) -> Pool:
    return msgspec.structs.replace(pool, cells=cells)


def test_another_regions_ingress_that_nobody_could_connect_to_gets_no_share() -> None:
    bad = SpillTarget("south", "south.example.test", 8080)
    desired = desired_from(with_pool(spill=(*POOL.spill, bad), fractions={"east": 0.5, "west": 0.3, "south": 0.2}))
    assert desired.maps[SHARES_MAP] == {"pool.chat": "300"}
    assert [server.name for server in desired.servers] == ["c-1-g3", "north.standby", "west"]
    assert desired.left_out == ("address of ingress of south must be an IP address, not 'south.example.test'",)
