"""Targets of load balancers: in after the table, out before the drain, and never by an address alone."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from traffic.planning.entry_targets import Target, TargetIngress, TargetPlan, plan_targets

A = TargetIngress("i-a", "10.0.0.1", 8080, ready=True)
B = TargetIngress("i-b", "10.0.0.2", 8080, ready=True)


def target(ingress: TargetIngress, **columns: object) -> Target:
    return replace(Target(ingress.id, "g", ingress.address, ingress.port), **columns)  # type: ignore[arg-type]


def test_one_is_registered_once_it_runs_a_table() -> None:
    assert plan_targets(["g"], [replace(A, ready=False)], []) == TargetPlan()
    assert plan_targets(["g"], [A], []) == TargetPlan(register=(target(A),))
    assert plan_targets(["g"], [A], [target(A)]) == TargetPlan()


def test_one_that_falls_silent_stays() -> None:
    assert plan_targets(["g"], [replace(A, ready=False)], [target(A)]) == TargetPlan()


def test_one_that_leaves_is_taken_out_if_another_serves() -> None:
    leaving = replace(A, leaving=True)
    assert plan_targets(["g"], [leaving], [target(A)]) == TargetPlan()
    assert plan_targets(["g"], [leaving, B], [target(A), target(B)]) == TargetPlan(deregister=(target(A),))
    assert plan_targets(["g"], [leaving, B], [target(A, draining=True), target(B)]) == TargetPlan()


def test_one_that_is_no_more_is_taken_out_also_as_the_last() -> None:
    assert plan_targets(["g"], [], [target(A)]) == TargetPlan(deregister=(target(A),))


def test_an_address_that_another_ingress_has_by_now_is_left_registered() -> None:
    heir = TargetIngress("i-heir", A.address, A.port, ready=True)
    assert plan_targets(["g"], [heir], [target(A)]) == TargetPlan(register=(target(heir),), forget=(target(A),))
    assert plan_targets(["g"], [heir], [target(A), target(heir)]) == TargetPlan(forget=(target(A),))


addresses = st.sampled_from(["10.0.0.1", "10.0.0.2", "10.0.0.3"])
ingress = st.builds(
    TargetIngress, st.sampled_from("abcd"), addresses, st.just(80), ready=st.booleans(), leaving=st.booleans()
)


@given(
    st.lists(ingress, unique_by=lambda each: each.id),
    st.lists(
        st.builds(Target, st.sampled_from("abcdef"), st.just("g"), addresses, st.just(80), draining=st.booleans()),
        unique_by=lambda each: each.ingress,
    ),
)
def test_nothing_is_said_twice_and_who_serves_is_never_taken_out(
    ingresses: list[TargetIngress], targets: list[Target]
) -> None:
    plan = plan_targets(["g"], ingresses, targets)
    ended = {(each.group, each.address, each.port) for each in plan.deregister}
    assert not ended & {(each.group, each.address, each.port) for each in plan.register}
    assert not {each.ingress for each in plan.deregister} & {
        each.id for each in ingresses if not each.leaving and target(each) in targets
    }
