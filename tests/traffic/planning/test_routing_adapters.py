"""Adapters in routing tables: whose name it is, and which cells have it while a rollout brings or takes it."""

from dataclasses import replace

from engine_agent.protocol.ingress_messages import Pool, PoolAdapter
from traffic.planning.routing import IngressAddress, RoutableCell, ServedDeployment, describe_change, plan_pools

GATES = [IngressAddress("i-east", "east", "127.0.0.1", 8080), IngressAddress("i-west", "west", "127.0.0.1", 8081)]
CHAT = ServedDeployment("chat", ("chat", "llama"), "realtime")


def cell(
    name: str, *adapters: str, region: str = "east", state: str = "ready", generation: int = 1, of: str = "chat"
) -> RoutableCell:
    return RoutableCell(name, of, region, state, generation, "n-a", "10.0.0.1", 21000, 16, adapters)


def adapters(*cells: RoutableCell, region: str = "east", chat: ServedDeployment = CHAT) -> tuple[PoolAdapter, ...]:
    (found,) = plan_pools(region, [chat], cells, GATES)
    return found.adapters


def test_what_every_cell_has_is_served_by_all_under_the_model_s_name() -> None:
    assert adapters(cell("c1", "tuned"), cell("c2", "tuned", region="west")) == (PoolAdapter("tuned", "llama"),)
    assert adapters(cell("c1")) == ()


def test_before_its_first_cell_a_deployment_has_the_adapters_of_its_version() -> None:
    assert adapters(chat=replace(CHAT, adapters=("tuned",))) == (PoolAdapter("tuned", "llama"),)


def test_during_a_rollout_the_starts_that_have_it_are_named_in_each_region() -> None:
    cells = (cell("c1", "tuned", generation=2), cell("c2"), cell("c3", region="west"))
    assert adapters(*cells) == (PoolAdapter("tuned", "llama", ("c1-g2",)),)
    assert adapters(*cells, region="west") == (PoolAdapter("tuned", "llama", ()),)


def test_a_region_that_is_done_still_names_its_cells_while_another_is_not() -> None:
    cells = (cell("c1", "tuned"), cell("c3", region="west"))
    assert adapters(*cells) == (PoolAdapter("tuned", "llama", ("c1-g1",)),)


def test_a_draining_cell_that_lacks_it_is_asked_for_nothing_and_holds_nothing_up() -> None:
    assert adapters(cell("c1", "tuned"), cell("c2", state="draining")) == (PoolAdapter("tuned", "llama"),)


def test_an_adapter_that_both_versions_have_is_never_narrowed() -> None:
    cells = (cell("c1", "tuned", "new"), cell("c2", "tuned"))
    assert adapters(*cells) == (PoolAdapter("new", "llama", ("c1-g1",)), PoolAdapter("tuned", "llama"))


def test_a_name_that_two_have_got_all_the_same_leads_to_one_and_never_to_an_adapter_of_a_model_s_name() -> None:
    other = ServedDeployment("other", ("other",), "realtime", adapters=("tuned", "chat"))
    pools = plan_pools("east", [other, CHAT], [cell("c1", "tuned", "other"), cell("c2", "tuned", of="other")], GATES)
    assert {pool.name: [adapter.name for adapter in pool.adapters] for pool in pools} == {
        "chat": ["tuned"],
        "other": [],
    }


def test_a_change_says_which_cells_have_it() -> None:
    def pools(*cells: RoutableCell) -> tuple[Pool, ...]:
        return plan_pools("east", [CHAT], cells, GATES)

    without, some, every = pools(cell("c1"), cell("c2")), pools(cell("c1", "a"), cell("c2")), pools(cell("c1", "a"))
    assert describe_change(without, some) == "adapter a: c1-g1"
    assert describe_change(some, every) == "-c2; adapter a: every cell"
    assert describe_change(every, pools(cell("c1"))) == "adapter a is no longer served"
