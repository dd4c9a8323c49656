"""Which versions compile, and which compile caches make room for a new one."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from models_registry.compile_caches.planner import (
    KEYS_PER_RANK,
    StoredCache,
    most_bytes_of_one,
    plan_removals,
    why_not_compiled,
)
from models_registry.versions.planning.spec import VersionSpec
from tests.fleet.rows import NOW

NEW = StoredCache(100, 1, "local.cpu", 0, 10, NOW, is_retired=False)


def cache(id: int, *, used_s_ago: float = 0.0, **changes: object) -> StoredCache:
    return replace(NEW, id=id, used_at=NOW - timedelta(seconds=used_s_ago), **changes)  # type: ignore[arg-type]


def test_nothing_goes_while_there_is_room() -> None:
    assert plan_removals(NEW, [cache(1), cache(2)], 30) == ()
    assert most_bytes_of_one(400) == 100


def test_the_least_recently_used_goes_first_and_no_more_than_needed() -> None:
    others = [cache(1, used_s_ago=5, version=2), cache(2, used_s_ago=9, version=3), cache(3, used_s_ago=7, version=4)]
    assert plan_removals(NEW, others, 30) == (2,)
    assert plan_removals(NEW, others, 20) == (2, 3)
    assert plan_removals(replace(NEW, bytes=25), others, 30) == (2, 3, 1)


def test_those_of_retired_versions_go_before_all_others() -> None:
    others = [cache(1, used_s_ago=99, version=2), cache(2, version=3, is_retired=True)]
    assert plan_removals(NEW, others, 20) == (2,)


def test_new_keys_of_one_rank_only_replace_those_of_the_same_rank() -> None:
    alike = [cache(id, used_s_ago=100 - id) for id in range(KEYS_PER_RANK)]
    others = [cache(50, used_s_ago=999, version=2), cache(51, used_s_ago=999, rank=1)]
    assert plan_removals(NEW, [*others, *alike], 10**9) == (0,)


def vllm(by_type: dict[str, Any] | None = None, **changes: Any) -> VersionSpec:
    spec = VersionSpec(
        model="m",
        version="1",
        engine="vllm",
        artifact_uri="file:///model",
        artifact_digest="",
        ready_timeout_s=90.0,
        parallelism={"local.cpu": {}, "p5.48xlarge": {}},
        by_type=by_type or {},
        context_length=2048,
        max_concurrency=4,
    )
    return replace(spec, **changes)


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (vllm(), ""),
        (vllm(engine_options={"enforce_eager": False}), ""),
        (vllm(engine_options={"enforce-eager": True}), "This version does not compile: it states enforce_eager."),
        (
            vllm(engine_env={"TORCH_COMPILE_DISABLE": "1"}),
            "This version does not compile: it states TORCH_COMPILE_DISABLE.",
        ),
        (vllm({"local.cpu": {"engine_options": {"enforce_eager": True}}}), ""),
        (vllm(engine="sim"), "Engine sim has no compile cache."),
        (
            vllm({"local.cpu": {"engine": "llama-cpp"}}, engine_options={"enforce_eager": True}),
            "Engine llama-cpp has no compile cache. This version does not compile: it states enforce_eager.",
        ),
    ],
)  # fmt: skip
def test_a_version_that_compiles_nowhere_says_why(spec: VersionSpec, why: str) -> None:
    assert why_not_compiled(spec) == why
