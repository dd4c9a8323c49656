"""The command lines of SGLang's ranks are in golden files, and SGLang's own parser takes them: the parsers of the
versions that the recipes name were recorded (`record_parser.py`)."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine_agent.cell_proxy.engine_counters import TokenTotals, read_counters, read_totals
from engine_agent.engines.base import EngineUnavailable
from engine_agent.engines.registry import check_plan
from engine_agent.engines.sglang.adapter import SglangAdapter
from engine_agent.node.launch import proxy_launch
from engine_agent.protocol.engine_options import SGLANG, SGLANG_QUANTIZATIONS, Bounds, OneOf
from engine_agent.protocol.messages import Artifact, Assignment, Peer, PlanAdapter
from engine_agent.protocol.states import MemberRole, Phase
from lab.versions import P5, spec
from models_registry.versions.planning.engine_arguments import render_engine_plan
from tests.engine_agent.engines.contexts import PORT_BASE, context, peer

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
PYTHON = "/cache/engines/sglang/bin/python"
NODES = [replace(context(sglang=PYTHON), host=f"10.0.0.{rank + 1}") for rank in range(3)]
PLAN = render_engine_plan(
    spec(
        "sglang",
        P5,
        {"nodes": 2, "tp": 8, "pp": 2},
        artifact_uri="file:///srv/llama",
        artifact_digest="sha256:" + "0" * 64,
        quantization={"method": "fp8"},
        engine_options={"mem_fraction_static": 0.85, "chunked_prefill_size": -1, "kv_cache_dtype": "fp8_e5m2"},
    ),
    P5,
)


def assignment(rank: int, *peers: Peer, **plan: Any) -> Assignment:
    return Assignment(
        cell="c-1",
        generation=3,
        rank=rank,
        role=MemberRole.LEADER if rank == 0 else MemberRole.FOLLOWER,
        phase=Phase.SERVE,
        secret="s",
        peers=peers or (peer(0),),
        plan=msgspec.structs.replace(PLAN, **plan),
    )


PAIR = (peer(0), peer(1))
CASES = {
    "one_node": assignment(0),
    "two_nodes_leader": assignment(0, *PAIR),
    "two_nodes_follower": assignment(1, *PAIR),
}
PARSERS = sorted(HERE.glob("parser_*.json"))


def command(order: Assignment) -> list[str]:
    """The command line of the engine itself."""
    argv = list(SglangAdapter().launch(order, NODES[order.rank]).argv)
    return argv[argv.index("sglang.launch_server") + 1 :]


def recorded_parser(path: Path) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    types = {"int": int, "float": float}
    for option in json.loads(path.read_text())["options"]:
        flags = option.pop("flags")
        if option.pop("switch", False):
            parser.add_argument(*flags, action="store_true")
        else:
            parser.add_argument(*flags, type=types.get(option.pop("type", ""), str), **option)
    return parser


@pytest.mark.parametrize("name", CASES)
def test_a_rank_is_started_with_what_its_golden_file_has(name: str) -> None:
    launch = SglangAdapter().launch(CASES[name], NODES[CASES[name].rank])
    argv = ["<agent's python>" if word == sys.executable else word for word in launch.argv]
    found = {"argv": argv, "env": dict(launch.env), "reads": list(map(str, launch.reads))}
    assert found == json.loads((HERE / "golden" / f"{name}.json").read_text())


class Parsed:
    """What SGLang's parser made of a command line, by option."""

    def __init__(self, path: Path, words: Sequence[str]) -> None:
        parser = recorded_parser(path)
        self._names = {flag: action.dest for action in parser._actions for flag in action.option_strings}
        self._values = vars(parser.parse_args(words))

    def __getitem__(self, flag: str) -> Any:
        return self._values[self._names[flag]]

    def all(self, *flags: str) -> list[Any]:
        return [self[flag] for flag in flags]


@pytest.mark.parametrize("path", PARSERS, ids=lambda path: path.stem)
def test_sglangs_own_parser_takes_every_command_line(path: Path) -> None:
    alone, leader, follower = (Parsed(path, command(order)) for order in CASES.values())
    meeting = ("--nnodes", "--node-rank", "--dist-init-addr", "--nccl-port", "--port")
    assert alone.all(*meeting) == [None, None, None, PORT_BASE + 6, PORT_BASE + 3]
    assert leader.all(*meeting) == [2, 0, f"10.0.0.1:{PORT_BASE + 8 + 3}", None, PORT_BASE + 3]
    assert follower.all(*meeting) == [2, 1, f"10.0.0.1:{PORT_BASE + 8 + 3}", None, PORT_BASE + 4]
    assert leader.all("--tp-size", "--pp-size", "--max-running-requests") == [8, 2, 16]
    assert leader.all("--quantization", "--mem-fraction-static", "--chunked-prefill-size") == ["fp8", 0.85, -1]
    assert leader.all("--enable-metrics", "--disable-radix-cache", "--enable-cache-report") == [True] * 3
    assert int(leader["--context-length"]) == 2048


@pytest.mark.parametrize("path", PARSERS, ids=lambda path: path.stem)
def test_sglangs_own_parser_takes_every_option_and_value_of_the_list(path: Path) -> None:
    for name, rule in SGLANG.items():
        values = rule.names if isinstance(rule, OneOf) else ()
        if isinstance(rule, Bounds):
            values = tuple(str(int(each)) if rule.whole else str(float(each)) for each in (rule.least, rule.most))
        for words in [[f"--{name}", value] for value in values] or [[f"--{name}"]]:
            read = Parsed(path, ["--model-path", "/m", *words])[f"--{name}"]
            assert read == (type(read)(words[1]) if values else True), words


def test_quantizations_of_a_version_are_options_of_the_engine() -> None:
    assert SGLANG["quantization"] == OneOf(SGLANG_QUANTIZATIONS)


def test_every_rank_is_asked_for_health_where_it_answers() -> None:
    urls = [SglangAdapter().health_url(order, NODES[order.rank]) for order in CASES.values()]
    assert urls == [f"http://127.0.0.1:{PORT_BASE + offset}/health" for offset in (3, 3, 4)]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (assignment(0, adapters=(PlanAdapter("fine", None),)), "a model as it is, and the plan has the adapter fine"),
        (assignment(0, draft=Artifact("file:///srv/draft", "sha256:1")), "a draft model"),
        (assignment(0, artifact=None), "names no artifact"),
        (assignment(1, peer(1), peer(2)), "names no peer of rank 0"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(wrong: Assignment, why: str) -> None:
    with pytest.raises(EngineUnavailable, match=why):
        SglangAdapter().launch(wrong, NODES[wrong.rank])
    with pytest.raises(EngineUnavailable, match="a link to one, at engines/sglang in the cache"):
        SglangAdapter().launch(assignment(0), context())


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (("--host", "10.0.0.1"), "--host, which the agent sets itself"),
        (("--model-path", "/x"), "may not be given the option --model-path"),
        (("--trust-remote-code",), "may not be given the option --trust-remote-code"),
        (("--enable-custom-logit-processor",), "may not be given the option"),
        (("--mem-fraction-static", "1.5"), "--mem-fraction-static is '1.5'; it must be a number from 0.05 to 0.99"),
        (("--load-format", "pt"), "is 'pt'; engine sglang may be given auto, dummy, safetensors"),
    ],
)
def test_an_agent_checks_every_option_again(args: tuple[str, ...], why: str) -> None:
    check_plan(PLAN)
    with pytest.raises(EngineUnavailable, match=why):
        check_plan(msgspec.structs.replace(PLAN, args=(*PLAN.args, *args)))


def test_the_proxy_reads_its_counters() -> None:
    """As SGLang's `metrics_collector.py` names them: a request's whole prompt counts, cached or not."""
    page = b'sglang:prompt_tokens_total{model_name="m"} 30.0\nsglang:generation_tokens_total{model_name="m"} 4.0\n'
    assert read_counters(page + b'sglang:cached_tokens_total{model_name="m"} 9.0\n') == TokenTotals(30, 4)
    assert read_totals(page) is None  # it counts no steps


def test_the_proxy_lets_clients_use_two_apis_with_text() -> None:
    argv = proxy_launch(assignment(0), NODES[0]).argv
    members = msgspec.json.decode(argv[argv.index("--engine-members") + 1])
    assert (members["sequences"], members["text_only"]) == (1, True)
    assert members["paths"] == ["/v1/chat/completions", "/v1/completions"]
    assert {"bootstrap_host", "custom_logit_processor", "lora_path", "rid"} <= set(members["refused"])
