"""Ranks of a cell compare their software; a difference names rank, field and both values."""

import json

import pytest

from engine_agent.protocol.fingerprint import (
    FINGERPRINT_MAX_FIELDS,
    FINGERPRINT_MAX_VALUE,
    FINGERPRINT_VARIABLE,
    BadFingerprint,
    Difference,
    Rank,
    checked_fingerprint,
    differing_fields,
    engine_fingerprint,
    fingerprint_digest,
    fingerprint_from,
    fingerprint_to_variable,
    first_mismatch,
    flags_digest,
    mismatch,
    rank_fingerprint,
)

MACHINE = {
    "kernel": "6.8",
    "python": "3.11.2",
    "sim.engine": "1",
    "vllm.engine": "vllm 0.16.0",
    "vllm.python": "3.12.1",
}


def test_a_cell_sees_the_machine_and_its_own_engine_and_no_other() -> None:
    assert engine_fingerprint(MACHINE, "sim") == {"kernel": "6.8", "python": "3.11.2", "engine": "1"}
    assert engine_fingerprint(MACHINE, "vllm") == {"kernel": "6.8", "python": "3.12.1", "engine": "vllm 0.16.0"}


def test_a_rank_adds_the_flags_and_the_weights_of_its_assignment() -> None:
    seen = rank_fingerprint(MACHINE, "sim", ("--seed", "1"), {}, "sha256:ab")
    assert seen["weights"] == "sha256:ab"
    assert seen["flags"] == flags_digest(("--seed", "1"), {})
    assert "weights" not in rank_fingerprint(MACHINE, "sim", (), {}, None)


def test_a_build_replaces_what_is_installed_on_the_node() -> None:
    installed, delivered = (rank_fingerprint(MACHINE, "vllm", (), {}, None, build=build) for build in ("", "sha256:1"))
    assert {field.field for field in differing_fields((installed, delivered))} == {"build", "engine", "python"}
    assert (delivered["build"], delivered["kernel"], delivered["python"]) == ("sha256:1", "6.8", "3.11.2")
    other = rank_fingerprint({**MACHINE, "vllm.engine": "vllm 0.17"}, "vllm", (), {}, None, build="sha256:1")
    assert other == delivered


def test_digests_are_equal_exactly_where_all_fields_are() -> None:
    assert fingerprint_digest({"a": "1", "b": "2"}) == fingerprint_digest({"b": "2", "a": "1"})
    assert fingerprint_digest({"a": "1", "b": "2"}) != fingerprint_digest({"a": "1", "b": "3"})
    assert fingerprint_digest({"a": "1"}) != fingerprint_digest({"a": "1", "b": "2"})


@pytest.mark.parametrize(
    "written",
    [
        ("--max-model-len=2048", "--dtype", "float32", "--enforce-eager"),
        ("--enforce-eager", "--dtype=float32", "--max-model-len", "2048"),
        ("--enforce_eager", "--dtype", "float32", "--max_model_len", "2048"),
    ],
)
def test_flags_count_however_they_are_written(written: tuple[str, ...]) -> None:
    known = ("--max-model-len", "2048", "--dtype", "float32", "--enforce-eager")
    assert flags_digest(written, {"A": "1"}) == flags_digest(known, {"A": "1"})


@pytest.mark.parametrize(
    ("args", "env"),
    [(("--dtype", "bfloat16"), {"A": "1"}), (("--dtype", "float32"), {"A": "2"}), ((), {"A": "1"})],
)
def test_another_flag_or_variable_is_another_digest(args: tuple[str, ...], env: dict[str, str]) -> None:
    assert flags_digest(args, env) != flags_digest(("--dtype", "float32"), {"A": "1"})


def test_of_a_flag_given_twice_the_order_counts() -> None:
    assert flags_digest(("--a", "1", "--a", "2"), {}) != flags_digest(("--a", "2", "--a", "1"), {})


def test_fields_that_differ_are_listed_with_every_value() -> None:
    seen = differing_fields(({"kernel": "6", "driver": "1"}, {"kernel": "6", "driver": "2"}, {"kernel": "6"}))
    assert seen == (Difference("driver", ("1", "2", None)),)


def test_a_mismatch_names_the_rank_the_field_and_both_values() -> None:
    leader, follower = Rank(0, "n-a", {"driver": "2.19", "efa": "1.30"}), Rank(1, "n-b", {"driver": "2.18"})
    assert mismatch(leader, follower) == (
        "fingerprint mismatch: rank 1 (n-b) differs from rank 0 (n-a): driver is 2.18 instead of 2.19; "
        "efa is absent instead of 1.30"
    )
    assert mismatch(leader, Rank(1, "n-c", leader.fingerprint)) == ""


def test_the_first_rank_that_differs_is_named_whatever_the_order() -> None:
    ranks = [Rank(2, "n-c", {"a": "3"}), Rank(1, "n-b", {"a": "2"}), Rank(0, "n-a", {"a": "1"})]
    assert first_mismatch(ranks).startswith("fingerprint mismatch: rank 1 (n-b) differs from rank 0 (n-a): a is 2")
    assert first_mismatch(ranks[2:]) == first_mismatch([]) == ""


def test_it_reaches_the_engine_in_a_variable() -> None:
    assert fingerprint_from({FINGERPRINT_VARIABLE: fingerprint_to_variable(MACHINE)}) == MACHINE
    assert fingerprint_from({}) == fingerprint_from({FINGERPRINT_VARIABLE: ""}) == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "f.json is not JSON"),
        ("[]", "f.json must be a JSON object of strings, not list"),
        ('{"a": 1}', "f.json: a must be a string, not 1"),
        ('{"a": ""}', "'a' is empty or too long"),
        (json.dumps({"a": "x" * (FINGERPRINT_MAX_VALUE + 1)}), "'a' is empty or too long"),
        (json.dumps({"": "x"}), "'' is empty or too long"),
        (json.dumps({str(at): "x" for at in range(FINGERPRINT_MAX_FIELDS + 1)}), "49 fields; at most 48"),
    ],
)
def test_what_is_no_fingerprint_is_refused_with_what_would_be_right(text: str, said: str) -> None:
    with pytest.raises(BadFingerprint, match=said):
        checked_fingerprint(text, "f.json")
