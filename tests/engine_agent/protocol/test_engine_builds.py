"""Facts of builds: what is accepted, and which hosts can run one."""

import json
from typing import Any

import pytest

from engine_agent.protocol.engine_builds import (
    BadBuild,
    EngineBuild,
    HostFacts,
    NeededBuild,
    parse_facts,
    part_names,
    why_no_build_runs,
    why_unsuitable,
)
from tests.engine_agent.engines.builds.packed import FACTS, facts

HOST = HostFacts("x86_64", frozenset({"avx2"}), "2.35", "570.26")


@pytest.mark.parametrize(
    ("needs", "why"),
    [
        ({}, ""),
        ({"least_glibc": "2.35", "least_driver": "525", "cpu_flags": ["avx2"]}, ""),
        ({"cpu_arch": "aarch64"}, "it is for aarch64 processors, and this host has x86_64"),
        ({"cpu_flags": ["avx2", "amx_tile"]}, "it needs a processor with amx_tile, which this host lacks"),
        ({"least_glibc": "2.36"}, "it needs glibc 2.36 or newer, and this host has 2.35"),
        ({"least_driver": "580"}, "it needs the NVIDIA driver 580 or newer, and this host has 570.26"),
    ],
)
def test_a_host_below_a_floor_is_named(needs: dict[str, Any], why: str) -> None:
    assert why_unsuitable(facts(**needs), HOST) == why


def needed(make: str, name: str, **needs: Any) -> NeededBuild:
    return NeededBuild(make, EngineBuild(name, facts=facts(**needs)))


NEWER, OLDER = needed("nvidia", "cuda13", least_driver="580"), needed("nvidia", "cuda12", least_driver="525")
FOREIGN = needed("cpu", "arm", cpu_arch="aarch64")


@pytest.mark.parametrize(
    ("builds", "makes", "why"),
    [
        pytest.param([], {"nvidia"}, "", id="none is named"),
        pytest.param([NEWER, OLDER], {"nvidia"}, "", id="one of two runs"),
        pytest.param([NEWER], {"neuron"}, "", id="for other accelerators"),
        pytest.param([NEWER], set(), "", id="for accelerators, on a host without"),
        pytest.param([FOREIGN], {"nvidia"}, "", id="for hosts without accelerators"),
        pytest.param([needed("nvidia", "x")], {"nvidia"}, "", id="fits"),
        pytest.param([NeededBuild("nvidia", EngineBuild("gone"))], {"nvidia"}, "", id="unknown by now"),
        pytest.param(
            [NEWER, FOREIGN],
            {"nvidia"},
            "this host can run no engine build that deployments of its region name: "
            "cuda13: it needs the NVIDIA driver 580 or newer, and this host has 570.26",
            id="an old driver",
        ),
        pytest.param(
            [needed("cpu", "b", least_glibc="2.39"), FOREIGN],
            set(),
            "this host can run no engine build that deployments of its region name: arm: it is for aarch64 processors, "
            "and this host has x86_64; b: it needs glibc 2.39 or newer, and this host has 2.35",
            id="each is named",
        ),
    ],
)
def test_a_host_that_can_run_no_named_build_is_told_why(builds: list[NeededBuild], makes: set[str], why: str) -> None:
    assert why_no_build_runs(builds, makes, HOST) == why


def test_a_build_for_gpus_needs_a_driver_and_one_for_glibc_needs_glibc() -> None:
    bare = HostFacts("x86_64", frozenset(), "", "")
    assert why_unsuitable(facts(least_driver="525"), HostFacts("x86_64", (), "2.39")).endswith(
        "none is loaded on this host"
    )
    assert why_unsuitable(facts(), bare) == "it needs glibc 2.17 or newer, and this host has none"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("serves", "generic"),
        ("serves", "vllm/extra"),
        ("serves", "../vllm"),
        ("program", "/bin/sh"),
        ("program", "../../bin/sh"),
        ("program", "bin/./../sh"),
        ("version", ""),
        ("version", "1\n2"),
        ("cpu_arch", "arm"),
        ("least_glibc", "new"),
        ("least_driver", "580; rm"),
        ("parts", 0),
        ("parts", 10**9),
        ("unpacked_bytes", -1),
        ("packed_bytes", 2**60),
        ("cpu_flags", ["avx2 "]),
        ("surprise", 1),
    ],
)
def test_wrong_facts_are_refused_by_field(field: str, value: Any) -> None:
    with pytest.raises(BadBuild, match=field):
        parse_facts(json.dumps({**FACTS, field: value}), "build.json")


@pytest.mark.parametrize("text", ["", "[]", "{", "null", "[" * 5000, " " * 100_000])
def test_what_is_no_object_of_facts_is_refused(text: str) -> None:
    with pytest.raises(BadBuild):
        parse_facts(text, "build.json")


def test_parts_have_names_in_order() -> None:
    assert part_names(facts(parts=2)) == ("part-0000", "part-0001")
