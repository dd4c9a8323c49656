"""An engine gets only listed options, and none that names code, a file or an address."""

import json

import pytest

from engine_agent.protocol.engine_options import (
    AGENTS_OWN,
    OPTIONS,
    VARIABLES,
    option_name,
    refused_in_plan,
    refused_option,
    refused_variable,
)

RUNS_PROGRAMS = (
    "trust_remote_code", "middleware", "worker_extension_cls", "worker_cls", "scheduler_cls", "logits_processors",
    "tool_parser_plugin", "reasoning_parser_plugin", "io_processor_plugin", "kv_transfer_config", "hf_overrides",
    "compilation_config", "model_class_overrides", "model_loader_extra_config", "profiler_config", "config",
)  # fmt: skip
READS_OR_LISTENS = (
    "allowed_local_media_path", "host", "port", "uds", "tokenizer", "hf_config_path", "download_dir", "chat_template",
    "log_config_file", "ssl_keyfile", "data_parallel_address", "master_addr", "otlp_traces_endpoint", "lora_modules",
)  # fmt: skip
VARIABLES_THAT_RUN = (
    "LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONWARNINGS", "BROWSER", "PYTHONSTARTUP", "PYTHONPATH", "VLLM_PLUGINS", "PATH",
    "HOME", "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_INSECURE_SERIALIZATION",
    "SWITCHYARD_CELL_SECRET", "SWITCHYARD_NODE_ID", "TMPDIR", "NCCL_NET_PLUGIN", "TORCHINDUCTOR_CACHE_DIR", "CXX",
)  # fmt: skip


HARMLESS = {"sglang": "--random-seed", "tensorrt-llm": "--max-num-tokens"}
"""Options of engines without `--seed`."""


@pytest.mark.parametrize("engine", sorted(OPTIONS))
@pytest.mark.parametrize("name", RUNS_PROGRAMS + READS_OR_LISTENS)
def test_an_option_that_names_code_a_file_or_an_address_is_refused(engine: str, name: str) -> None:
    refused = refused_option(engine, name, "x")
    assert refused is not None
    assert refused.name == option_name(name)
    assert f"engine {engine} may not be given the option {refused.name}" in refused.message
    assert refused_in_plan(engine, [HARMLESS.get(engine, "--seed"), "7", refused.name], {}) == refused
    assert refused_in_plan(engine, [f"{refused.name.replace('-', '_').replace('__', '--', 1)}=x"], {}) is not None


@pytest.mark.parametrize("engine", sorted(VARIABLES))
@pytest.mark.parametrize("name", VARIABLES_THAT_RUN)
def test_a_variable_that_is_not_listed_is_refused(engine: str, name: str) -> None:
    refused = refused_variable(engine, name)
    assert refused is not None
    assert refused_in_plan(engine, [], {name: "x"}) == refused


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--dtype", "--trust-remote-code"], "--trust-remote-code"),
        (["--seed", "-c"], "a value cannot begin with -"),
        (["-tp", "2"], "takes '-tp' only as an option's value"),
        (["--seed", "7", "serve"], "takes 'serve' only as an option's value"),
        (["--enforce-eager", "-O3"], "a value cannot begin with -"),
        (["--generation-config", "/etc"], "--generation-config is '/etc'; engine vllm may be given auto, vllm"),
        (["--load-format=pt"], "--load-format is 'pt'; engine vllm may be given auto, dummy, safetensors"),
        (["--speculative-config", '{"method": "custom_class", "model": "os"}'], "has the method 'custom_class'"),
        (["--speculative-config", '{"draft_load_config": {}}'], "has the key 'draft_load_config'"),
        (["--speculative-config", '{"rejection_sample_method": "synthetic"}'], "has the key 'rejection_sample_method'"),
        (["--additional-config", "x"], "it must be a JSON object"),
        (["--compilation-config.backend=x.y"], r"the option --compilation-config.backend"),
    ],
)
def test_no_way_around_the_list_through_a_command_line(args: list[str], message: str) -> None:
    refused = refused_in_plan("vllm", args, {})
    assert refused is not None
    assert message in refused.message


@pytest.mark.parametrize("engine", ["vllm", "neuron"])
@pytest.mark.parametrize(
    "place", ["/etc", "/a/../b", "~root", "..", "org/model", "s3://b/x", "https://a", "C:\\x", "x"]
)
def test_speculation_loads_the_draft_of_the_plan_and_nothing_else(engine: str, place: str) -> None:
    args = ["--speculative-config", json.dumps({"method": "eagle", "model": place})]
    assert (refused := refused_in_plan(engine, args, {}, (), {"/drafts/a"})) is not None
    assert f"names the path or URL {place!r}" in refused.message
    assert refused_in_plan(engine, args, {}, (), {place}) is None


@pytest.mark.parametrize("engine", OPTIONS)
@pytest.mark.parametrize("place", ["/etc/passwd", "../x", "file:///etc", "http://169.254.169.254/", "~/.ssh", "a/b"])
def test_no_option_takes_a_path_or_a_url(engine: str, place: str) -> None:
    values = (place, json.dumps({"x": [place]}), {"x": place})
    given = [(spelt, value) for name in OPTIONS[engine] for spelt in (name, f"--{name}") for value in values]
    assert [each for each in given if refused_option(engine, *each) is None] == []


@pytest.mark.parametrize("value", [{"a": 1}, ["a"], None, 1, True, 1e400])
def test_a_value_that_is_no_text_is_refused_and_no_error(value: object) -> None:
    assert all(refused_option("vllm", name, value) is not None for name in ("load_format", "tokenizer_mode"))


def test_what_versions_render_to_is_allowed() -> None:
    args = ["--enforce-eager", "--seed", "-1", "--max-num-seqs=16", "--speculative-config", '{"method": "ngram"}']
    assert refused_in_plan("vllm", args, {"OMP_NUM_THREADS": "1", "SWITCHYARD_CELL_HANG_S": "5"}) is None


def test_a_refusal_names_the_nearest_that_is_allowed() -> None:
    refused = refused_option("vllm", "max_num_seq", 16)
    assert refused is not None
    assert "the nearest that it may is --max-num-seqs" in refused.message
    variable = refused_variable("vllm", "VLLM_CPU_KV_CACHE_SPACE")
    assert variable is not None
    assert "the nearest that it may is VLLM_CPU_KVCACHE_SPACE" in variable.message


def test_what_admins_allow_is_allowed_by_its_name_alone() -> None:
    widened = ("--trust-remote-code", "LD_PRELOAD")
    args, env = ["--trust-remote-code"], {"LD_PRELOAD": "libtcmalloc.so"}
    assert refused_in_plan("vllm", args, env, widened) is None
    assert refused_in_plan("vllm", [*args, "--middleware", "x"], env, widened) is not None


@pytest.mark.parametrize("name", [*sorted(AGENTS_OWN), "SWITCHYARD_CELL_SECRET"])
def test_what_only_agents_set_nobody_can_allow(name: str) -> None:
    args, env = ([name, "x"], {}) if name.startswith("--") else ([], {name: "x"})
    refused = refused_in_plan("vllm", args, env, (name,))
    assert refused is not None
    assert "which the agent sets itself" in refused.message
