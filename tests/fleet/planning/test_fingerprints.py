"""Which nodes may be in one cell, by what their agents said that they run."""

from engine_agent.protocol.fingerprint import Difference
from fleet.planning.fingerprints import compare_stacks, member_stacks, stack_digest

OLD = {"driver": "2.26", "sim.engine": "sim 1", "vllm.engine": "vllm 0.16.0"}
NEW = {**OLD, "driver": "2.27"}


def test_only_the_machine_and_the_cells_engine_count() -> None:
    other_vllm = {**OLD, "vllm.engine": "vllm 0.17.0"}
    assert stack_digest(OLD, "sim") == stack_digest(other_vllm, "sim") != stack_digest(NEW, "sim")
    assert stack_digest(OLD, "vllm") != stack_digest(other_vllm, "vllm")
    assert stack_digest({}, "sim") == ""


def test_members_are_grouped_by_what_they_run_the_leaders_group_first() -> None:
    seen = compare_stacks(member_stacks("sim", [(2, "c", NEW), (1, "b", OLD), (0, "a", NEW)]))
    assert [[rank.node for rank in group.ranks] for group in seen.groups] == [["a", "c"], ["b"]]
    assert seen.differing == (Difference("driver", ("2.27", "2.26", "2.27")),)
    assert seen.groups[0].digest == stack_digest(NEW, "sim")


def test_a_node_that_has_said_nothing_is_no_difference() -> None:
    seen = compare_stacks(member_stacks("sim", [(0, "a", OLD), (1, "b", {})]))
    assert len(seen.groups) == 1
    assert not seen.differing
