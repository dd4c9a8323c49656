"""Names that several deployments answer, prefixes that stay together, and names that lead to one deployment only."""

from engine_agent.ingress.desired import desired_from
from engine_agent.protocol.ingress_messages import Affinity, Pool, RoutingTable, Split
from traffic.planning.routing import (
    IngressAddress,
    ServedDeployment,
    Steering,
    describe_change,
    describe_splits,
    plan_pools,
    plan_splits,
)
from traffic.planning.traffic_policy import TrafficPolicy

GATES = [IngressAddress("i-east", "east", "127.0.0.1", 8080)]
OLD = ServedDeployment("chat", ("chat", "org/llama"), "realtime")
NEW = ServedDeployment("chat-v2", ("chat-v2", "org/llama"), "realtime")


def pools(**steerings: Steering) -> tuple[Pool, ...]:
    return plan_pools("east", [NEW, OLD], [], GATES, steerings)


def test_two_versions_of_one_model_make_a_table_that_an_ingress_takes() -> None:
    found = pools()
    assert [pool.models for pool in found] == [("chat", "org/llama"), ("chat-v2",)]
    assert desired_from(RoutingTable(1, "east", found)).pools


def test_a_policy_splits_every_name_of_its_deployment() -> None:
    policy = TrafficPolicy(split={"chat": 95, "chat-v2": 5, "gone": 3, "idle": 0})
    splits = plan_splits([OLD, NEW], {"chat": Steering(policy=policy)})
    shares = {"chat": 95, "chat-v2": 5}
    assert splits == (Split("chat", shares), Split("org/llama", shares))
    assert desired_from(RoutingTable(1, "east", pools(), splits=splits)).pools
    assert plan_splits([OLD], {"chat": Steering(policy=TrafficPolicy(split={"gone": 1}))}) == ()
    assert plan_splits([OLD, NEW], {}) == ()


def test_a_policy_keeps_prefixes_together() -> None:
    kept = pools(chat=Steering(policy=TrafficPolicy(load_bound=1.5)))
    assert [pool.affinity for pool in kept] == [Affinity(1.5), None]
    assert "chat keeps prefixes together" in describe_change(pools(), kept)
    assert "chat goes by fewest requests alone" in describe_change(kept, pools())


def test_what_changed_about_splits_is_said() -> None:
    before, after = (Split("chat", {"a": 1}),), (Split("chat", {"a": 9, "b": 1}), Split("x", {"b": 1}, sticky=False))
    assert describe_splits(before, after) == ["model chat: a 90.0%, b 10.0%", "model x: b 100.0%, each request anew"]
    assert describe_splits(after, before)[-1] == "model x is no longer split"
    assert describe_splits(after, after) == []
