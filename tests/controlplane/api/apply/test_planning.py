"""What is missing between documents and what is there: exact steps for each, and nothing by omission."""

from typing import Any

import pytest

from controlplane.api.apply.planning import Action, Document, Kind, Plan, plan_documents, revision_of
from traffic.region_shares.planning.policy import TrafficPolicy, traffic_policy_as_json

SERVED: dict[str, Any] = {
    "model_version": "sim-70b@1",
    "instance_types": ["local.cpu"],
    "by_type": {"us-east-1": {}, "us-west-2": {"local.cpu": 1}},
    "serving_class": "realtime",
    "drain_deadline_s": 60.0,
    "update_policy": {"bake_s": 10},
    "slo": {"ttft_ms": 900},
    "scaling": {"mode": "act"},
    "markets": ["reserved", "on_demand"],
    "regions": {"us-east-1": 2, "us-west-2": {"min": 1, "max": 4}},
    "_target": "sim-70b@1",
}
VERSION: dict[str, Any] = {"engine": "sim", "context_length": 2048, "_state": "released"}
DRAFT: dict[str, Any] = {**VERSION, "_state": "draft", "_validating": False}
IMPORT: dict[str, Any] = {"source": "hf://org/model@main", "pattern": "", "engine": ""}


def planned(kind: Kind, name: str, spec: dict[str, Any], found: dict[str, Any] | None) -> Plan:
    return plan_documents([Document(0, kind, name, spec)], {(kind, name): found})


def steps(plan: Plan) -> list[tuple[str, str]]:
    return [(step.action, step.reason) for step in plan.steps]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({}, []),
        ({"regions": [{"region": "us-east-1", "cells": 2}]}, []),
        ({"model_version": "sim-70b@1", "update_policy": {"bake_s": 10}}, []),
        (
            {"regions": [{"region": "us-east-1", "cells": 3}]},
            [("scale", "sim-70b should have 3 cells in us-east-1, not 2")],
        ),
        (
            {"regions": [{"region": "mars", "cells": 1}]},
            [("scale", "sim-70b should have 1 cell in mars, not 0")],
        ),
        (
            {"update_policy": {"gate": {"min_samples": 9}}},
            [("change", "Deployment sim-70b differs in update_policy.gate.min_samples")],
        ),
        ({"regions": [{"region": "us-west-2", "cells": {"max": 4, "min": 1}}]}, []),
        ({"instance_types": ["local.cpu"], "by_type": {"us-west-2": {"local.cpu": 1}}}, []),
        (
            {"instance_types": ["local.sim", "local.cpu"], "by_type": {"us-east-1": {"local.sim": 2}}},
            [
                ("change", "Deployment sim-70b differs in instance_types"),
                ("change", "Deployment sim-70b differs in by_type.us-east-1"),
            ],
        ),
        (
            {"by_type": {"us-west-2": {}}},
            [("change", "Deployment sim-70b differs in by_type.us-west-2")],
        ),
        (
            {"regions": [{"region": "us-west-2", "cells": {"min": 2, "max": 4}}]},
            [("scale", "sim-70b should have 2 to 4 cells in us-west-2, not 1 to 4 cells")],
        ),
        (
            {"regions": [{"region": "us-west-2", "cells": 3}]},
            [("scale", "sim-70b should have 3 cells in us-west-2, not 1 to 4 cells")],
        ),
        (
            {"regions": [{"region": "us-west-2", "cells": {"prefill": 1, "decode": 3}}]},
            [("scale", "sim-70b should have 1 prefill and 3 decode cells in us-west-2, not 1 to 4 cells")],
        ),
        ({"scaling": {"mode": "act"}}, []),
        ({"scaling": {"slo_burn": None}}, [("change", "Deployment sim-70b differs in scaling.slo_burn")]),
        ({"slo": {"ttft_ms": 900}}, []),
        ({"markets": ["on_demand", "reserved"]}, []),
        ({"markets": []}, [("change", "Deployment sim-70b differs in markets")]),
        ({"slo": {"availability": 0.9}}, [("change", "Deployment sim-70b differs in slo.availability")]),
        ({"model_version": "sim-70b@2"}, [("roll_out", "sim-70b should serve sim-70b@2, runs sim-70b@1")]),
        (
            {"model_version": "sim-70b@2", "drain_deadline_s": 5.0, "regions": [{"region": "us-east-1", "cells": 1}]},
            [
                ("change", "Deployment sim-70b differs in drain_deadline_s"),
                ("scale", "sim-70b should have 1 cell in us-east-1, not 2"),
                ("roll_out", "sim-70b should serve sim-70b@2, runs sim-70b@1"),
            ],
        ),
    ],
)
def test_a_deployment_gets_the_steps_that_are_missing(spec: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    plan = planned(Kind.DEPLOYMENT, "sim-70b", spec, SERVED)
    assert steps(plan) == expected
    assert not plan.objections
    assert bool(plan.unchanged) is not bool(expected)


def test_what_is_on_its_way_there_needs_no_second_rollout() -> None:
    on_its_way = {**SERVED, "_target": "sim-70b@2"}
    assert not planned(Kind.DEPLOYMENT, "sim-70b", {"model_version": "sim-70b@2"}, on_its_way).steps
    back = planned(Kind.DEPLOYMENT, "sim-70b", {"model_version": "sim-70b@1"}, on_its_way)
    assert steps(back) == [
        ("roll_out", "sim-70b should serve sim-70b@1, runs sim-70b@1, with an active rollout to sim-70b@2")
    ]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (None, ["create", "validate"]),
        (DRAFT, ["validate"]),
        ({**DRAFT, "engine": "vllm"}, ["change", "validate"]),
        ({**DRAFT, "_validating": True}, []),
        (VERSION, []),
    ],
)
def test_a_draft_is_validated_after_its_change(found: dict[str, Any] | None, expected: list[str]) -> None:
    plan = planned(Kind.MODEL_VERSION, "m@1", {"engine": "sim", "validate": True}, found)
    assert [step.action for step in plan.steps] == expected
    assert all("validate" not in step.arguments for step in plan.steps)


def test_an_import_of_the_same_branch_is_there_already() -> None:
    assert not planned(Kind.MODEL_IMPORT, "m@1", {"source": "hf://org/model"}, IMPORT).steps


def test_a_change_says_what_was_and_what_will_be() -> None:
    (step,) = planned(Kind.DEPLOYMENT, "sim-70b", {"update_policy": {"bake_s": 60}}, SERVED).steps
    (change,) = step.changes
    assert (change.field, change.before, change.after) == ("update_policy.bake_s", 10.0, 60.0)
    assert step.arguments == {"update_policy": {"bake_s": 60}}


def test_what_there_is_not_is_created_with_all_that_is_stated() -> None:
    spec = {"spares": {"local.cpu": 1}}
    (step,) = planned(Kind.REGION, "eu-west-1", spec, None).steps
    assert (step.action, step.reason, step.arguments) == (Action.CREATE, "Region eu-west-1 does not exist", spec)


@pytest.mark.parametrize(
    ("kind", "name", "spec", "found", "field", "rule"),
    [
        (Kind.DEPLOYMENT, "a", {"model_version": "m@1"}, None, "spec.instance_types", "required"),
        (Kind.DEPLOYMENT, "a", {"update_policy": {"bake": 1}}, SERVED, "spec.update_policy.bake", "policy"),
        (Kind.REGION, "a", {"provider": "aws"}, {"provider": "local"}, "spec.provider", "fixed"),
        (Kind.MODEL_VERSION, "m@1", {"context_length": 9}, VERSION, "spec.context_length", "immutable"),
        (Kind.MODEL_IMPORT, "m@1", {}, None, "spec.source", "required"),
        (Kind.MODEL_IMPORT, "m@1", {"source": "hf://org/other"}, IMPORT, "spec.source", "fixed"),
        (
            Kind.TRAFFIC_POLICY,
            "a",
            {"utilisation_cap": 0.99},
            traffic_policy_as_json(TrafficPolicy()),
            "spec.utilisation_cap",
            "policy",
        ),
    ],
)
def test_what_no_step_can_do_is_an_objection_with_its_path(
    kind: Kind, name: str, spec: dict[str, Any], found: dict[str, Any] | None, field: str, rule: str
) -> None:
    plan = planned(kind, name, spec, found)
    assert not plan.steps
    (objection,) = plan.objections
    assert (objection.field, objection.rule) == (field, rule)


def test_a_draft_may_change_and_a_version_that_says_the_same_stays() -> None:
    assert planned(Kind.MODEL_VERSION, "m@1", {"context_length": 9}, {**VERSION, "_state": "draft"}).steps
    assert not planned(Kind.MODEL_VERSION, "m@1", {"context_length": 2048}, VERSION).objections


def test_what_others_need_comes_first_and_rollouts_last() -> None:
    documents = [
        Document(0, Kind.FAULT_RULE, "slow", {"mode": "off"}),
        Document(1, Kind.DEPLOYMENT, "sim-70b", {"model_version": "sim-70b@2"}),
        Document(2, Kind.MODEL_VERSION, "sim-70b@2", {"engine": "sim"}),
        Document(3, Kind.REGION, "eu-west-1", {}),
    ]
    present = {(one.kind, one.name): None for one in documents}
    plan = plan_documents(
        documents,
        {**present, (Kind.DEPLOYMENT, "sim-70b"): SERVED, (Kind.FAULT_RULE, "slow"): {"mode": "on"}},
    )
    assert [step.document.index for step in plan.steps] == [3, 2, 0, 1]


def test_the_same_thing_described_twice_is_an_objection() -> None:
    documents = [Document(index, Kind.MODEL, "m", {}) for index in range(2)]
    (objection,) = plan_documents(documents, {(Kind.MODEL, "m"): {}}).objections
    assert objection.message == "Model m is a duplicate: documents 0 and 1"


def test_spares_stated_in_another_way_are_the_same() -> None:
    found = {"spares": {"local.cpu": 1}}
    assert not planned(Kind.REGION, "r", {"spares": {"local.cpu": {"warm": 1}}}, found).steps
    assert planned(Kind.REGION, "r", {"spares": {"local.cpu": {"warm": 1, "repair_only": 1}}}, found).steps
    assert planned(Kind.REGION, "r", {"spares": {"local.cpu": "many"}}, found).steps, "its service refuses it"


def test_the_revision_tells_whether_anything_differs() -> None:
    key = (Kind.DEPLOYMENT, "sim-70b")
    assert revision_of({key: SERVED}) == revision_of({key: dict(reversed(SERVED.items()))})
    assert revision_of({key: SERVED}) != revision_of({key: {**SERVED, "_target": "sim-70b@2"}})


def test_a_scaling_policy_that_makes_no_sense_is_objected_to() -> None:
    plan = planned(Kind.DEPLOYMENT, "sim-70b", {"scaling": {"target": 1}}, SERVED)
    assert [(one.field, one.rule) for one in plan.objections] == [("spec.scaling.target", "policy")]
