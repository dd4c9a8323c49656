"""The command line and the configuration of TensorRT-LLM are in a golden file and fit its documentation, as far as
`trtllm_serve.json` records it. It cannot be installed here."""

import json
import sys
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from click.testing import CliRunner

from engine_agent.cell_proxy.engine_counters import TokenTotals, read_counters
from engine_agent.engines.base import EngineUnavailable
from engine_agent.engines.registry import check_plan
from engine_agent.engines.tensorrt_llm.adapter import TensorrtLlmAdapter, split_options
from engine_agent.node.launch import proxy_launch
from engine_agent.protocol.engine_options import TENSORRT_LLM, Bounds, OneOf
from engine_agent.protocol.messages import Assignment, Peer
from lab.versions import P5, spec
from models_registry.versions.planning.engine_arguments import render_engine_plan
from tests.engine_agent.engines.contexts import PORT_BASE, context, leader_order, not_plain

HERE = Path(__file__).parent
NODE = context(**{"tensorrt-llm": "/cache/engines/tensorrt-llm/bin/python"})
DOCUMENTED = json.loads((HERE / "trtllm_serve.json").read_text())
PLAN = render_engine_plan(
    spec(
        "tensorrt-llm",
        P5,
        {"tp": 4, "pp": 2},
        artifact_uri="file:///srv/llama",
        artifact_digest="sha256:" + "0" * 64,
        engine_options={
            "kv_cache_free_gpu_memory_fraction": 0.8,
            "host_cache_gib": 32,
            "enable_block_reuse": True,
            "enable_chunked_prefill": True,
            "max_num_tokens": 4096,
            "kv_cache_dtype": "fp8",
        },
    ),
    P5,
)


def assignment(*peers: Peer, **plan: Any) -> Assignment:
    return leader_order(PLAN, *peers, **plan)


def launched() -> dict[str, Any]:
    launch = TensorrtLlmAdapter().launch(assignment(), NODE)
    argv = ["<agent's python>" if word == sys.executable else word for word in launch.argv]
    places = {"reads": list(map(str, launch.reads)), "writes": list(map(str, launch.writes))}
    return {"argv": argv, "env": dict(launch.env), **places}


def documented_command() -> tuple[click.Command, dict[str, Any]]:
    """A command with the documented options, and what it was called with."""
    called: dict[str, Any] = {}
    command = click.Command(
        "serve", callback=lambda **values: called.update(values), params=[click.Argument(["model"])]
    )
    types: dict[str, Any] = {"int": int, "float": float, "text": str}
    for name, kind in DOCUMENTED["values"].items():
        taken = click.Choice(kind) if isinstance(kind, list) else types[kind]
        command.params.append(click.Option([name], type=taken))
    command.params += [click.Option([name], is_flag=True) for name in DOCUMENTED["switches"]]
    return command, called


def test_it_is_started_with_what_its_golden_file_has() -> None:
    assert launched() == json.loads((HERE / "golden" / "one_node.json").read_text())


def test_the_documented_command_takes_the_command_line() -> None:
    argv = launched()["argv"]
    command, called = documented_command()
    ran = CliRunner().invoke(command, argv[argv.index("serve") + 1 :])
    assert ran.exit_code == 0, ran.output
    assert (called["tp_size"], called["pp_size"], called["max_batch_size"], called["max_seq_len"]) == (4, 2, 16, 2048)
    assert (called["enable_chunked_prefill"], called["max_num_tokens"], called["port"]) == (True, 4096, PORT_BASE + 3)
    assert Path(called["model"]).name == "llama"  # the name that it gives the model in answers


def test_every_option_of_the_list_is_documented() -> None:
    for name, rule in TENSORRT_LLM.items():
        values = rule.names if isinstance(rule, OneOf) else (str(rule.least),) if isinstance(rule, Bounds) else (None,)
        options, configuration = split_options([f"--{name}", *filter(None, values[:1])])
        is_cache = configuration["kv_cache_config"].keys() - {"enable_block_reuse"} or name == "enable-block-reuse"
        assert configuration["kv_cache_config"].keys() <= DOCUMENTED["kv_cache_config"].keys()
        assert bool(is_cache) != bool(options), name
        assert set(options[:1]) <= {*DOCUMENTED["values"], *DOCUMENTED["switches"]}


def test_the_file_states_the_cache_and_turns_the_metrics_on() -> None:
    argv = launched()["argv"]
    assert json.loads(argv[argv.index("--file") + 2]) == {
        "kv_cache_config": {
            "dtype": "fp8",
            "enable_block_reuse": True,
            "free_gpu_memory_fraction": 0.8,
            "host_cache_size": 32 * 1024**3,
        },
        "return_perf_metrics": True,
    }
    assert split_options(()) == ((), {"kv_cache_config": {"enable_block_reuse": False}, "return_perf_metrics": True})


@pytest.mark.parametrize("prefix", [b"trtllm_", b""])
def test_the_proxy_reads_its_counters_with_and_without_their_prefix(prefix: bytes) -> None:
    page = b'%bprompt_tokens_total{engine_type="e"} 30.0\n%bgeneration_tokens_total{engine_type="e"} 4.0\n'
    assert read_counters(page % (prefix, prefix)) == TokenTotals(30, 4)
    assert read_counters(b"trtllm_prompt_cached_tokens_total 9.0\n") is None


def test_the_proxy_reads_the_counters_where_reading_removes_nothing() -> None:
    argv = proxy_launch(assignment(), NODE).argv
    assert argv[argv.index("--metrics-path") + 1] == "/prometheus/metrics"
    assert "/prometheus/metrics" in DOCUMENTED["routes"]
    members = msgspec.json.decode(argv[argv.index("--engine-members") + 1])
    assert set(members["paths"]) <= set(DOCUMENTED["routes"])
    assert {"disaggregated_params", "chat_template"} <= set(members["refused"])
    assert TensorrtLlmAdapter().health_url(assignment(), NODE) == f"http://127.0.0.1:{PORT_BASE + 3}/health"


@pytest.mark.parametrize(
    ("wrong", "why"),
    not_plain(PLAN),
)
def test_what_it_cannot_do_is_refused_by_name(wrong: Assignment, why: str) -> None:
    with pytest.raises(EngineUnavailable, match=why):
        TensorrtLlmAdapter().launch(wrong, NODE)
    with pytest.raises(EngineUnavailable, match="at engines/tensorrt-llm in the cache"):
        TensorrtLlmAdapter().launch(assignment(), context())


@pytest.mark.parametrize("option", ["--extra-llm-api-options", "--trust-remote-code", "--custom-module-dirs"])
def test_no_plan_names_files_or_code(option: str) -> None:
    check_plan(PLAN)
    with pytest.raises(EngineUnavailable, match=f"may not be given the option {option}"):
        check_plan(msgspec.structs.replace(PLAN, args=(*PLAN.args, option)))
