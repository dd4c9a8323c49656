"""The second half: only a known stack is started, in the way that it has. The stack itself cannot be had here."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from engine_agent.engines.neuron import serve
from engine_agent.engines.neuron.serve import check_plan_is_for
from engine_agent.engines.vllm import serve as vllm_serve
from engine_agent.engines.vllm.options import parse
from engine_agent.engines.vllm.serve import EXIT_NO_VLLM, SHUTDOWN_TIMEOUT_S, Server, vllm_argv
from engine_agent.protocol.neuron_targets import (
    NATIVE_0_24,
    NXDI_2_28,
    NXDI_2_29,
    NeuronTarget,
    NoTarget,
    installed_target,
)

pytestmark = pytest.mark.processes

FOR_TRN1 = {"vllm-neuron": "0.4.1", "vllm": "0.13.0", "neuronx-distributed-inference": "0.8.16251"}
NATIVE = {"vllm-neuron": "0.24.0.1.1.0", "vllm": "0.24.0"}
COMPLETE = {"vllm-neuron": "0.5.0", "vllm": "0.16.0", "neuronx-distributed-inference": "0.9.17334"}
LINE = (
    "--node-id n-1 --cell c --generation 1 --rank 0 --role leader --host 10.0.0.1 --port 9403 --served-model m "
    "--model-dir /m --digest sha256:1 -- --tensor-parallel-size 32"
)
OPTIONS = parse(LINE.split(), {})


def test_a_target_is_found_by_its_distributions() -> None:
    assert installed_target(COMPLETE.get) is NXDI_2_29
    assert installed_target(FOR_TRN1.get) is NXDI_2_28
    assert installed_target(NATIVE.get) is NATIVE_0_24


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"vllm-neuron": None}, r"not installed; install one of nxdi-2.28 \(Neuron SDK 2.28: vllm-neuron 0.4.\*"),
        ({"vllm-neuron": "0.2.2+lts"}, r"vllm-neuron is 0.2.2\+lts; this agent starts nxdi-2.28 .* native-0.24"),
        ({"vllm-neuron": "0.24.0.1.1.0"}, r"vllm is 0.16.0; vllm-neuron 0.24.0.1.1.0 needs 0.24.\*"),
        ({"vllm": "0.11.0"}, r"vllm is 0.11.0; vllm-neuron 0.5.0 needs 0.16.\*"),
        ({"vllm-neuron": "0.4.1"}, r"vllm is 0.16.0; vllm-neuron 0.4.1 needs 0.13.\*"),
        ({"neuronx-distributed-inference": None}, r"neuronx-distributed-inference is not .* needs 0.9.\*"),
    ],
)  # fmt: skip
def test_another_stack_says_what_it_is_and_what_would_do(changes: dict[str, str | None], reason: str) -> None:
    with pytest.raises(NoTarget, match=reason):
        installed_target({**COMPLETE, **changes}.get)


def test_a_plan_of_another_build_is_refused_by_name() -> None:
    of_nxdi = ("--additional-config", '{"override_neuron_config": {}}')
    check_plan_is_for(NXDI_2_29, of_nxdi)
    check_plan_is_for(NATIVE_0_24, ())
    with pytest.raises(NoTarget, match=r"this is native-0.24, .* states override_neuron_config: .*\(nxdi-2.28, nxdi"):
        check_plan_is_for(NATIVE_0_24, of_nxdi)


def test_a_python_without_neuron_ends_with_that_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.main([]) == EXIT_NO_VLLM
    assert "vllm-neuron is not installed" in capsys.readouterr().err


def test_the_backend_is_selected_unless_the_plan_has_done_so() -> None:
    selected = {"VLLM_NEURON_FRAMEWORK": "neuronx-distributed-inference"}
    assert serve.target_environment(NXDI_2_29, {}) == selected
    assert serve.target_environment(NXDI_2_29, {"VLLM_NEURON_FRAMEWORK": "other"}) == {}


def test_options_that_this_vllm_does_not_have_are_left_out() -> None:
    argv = vllm_argv(OPTIONS, Server(NXDI_2_29.server_argv, lambda _argv, _act: None).argv)
    assert "--shutdown-timeout" not in argv
    assert "--shutdown-timeout" in vllm_argv(OPTIONS, ("--shutdown-timeout", str(SHUTDOWN_TIMEOUT_S)))
    assert argv[-2:] == ["--tensor-parallel-size", "32"]


def test_the_targets_server_runs_with_the_options_and_the_last_act_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "stand_in_server.py").write_text("import sys\nprint(__name__, sys.argv[1:])\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["before"])
    acts: list[str] = []
    serve.run_server(
        NeuronTarget("t", "0", (), {}, "s", (), server="stand_in_server"), ["--seed", "1"], lambda: acts.append("last")
    )
    assert capsys.readouterr().out == "__main__ ['--seed', '1']\n"
    assert acts == ["last"]


def test_nothing_of_neuron_or_vllm_is_imported_until_it_is_chosen() -> None:
    script = (
        "import sys, engine_agent.engines.registry;"
        "import engine_agent.engines.neuron.serve;"
        "print([name for name in sys.modules if name.split('.')[0] in "
        "('vllm', 'vllm_neuron', 'torch', 'neuronx_distributed_inference', 'boto3', 'botocore')])"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "[]"


def test_there_is_a_place_for_the_compiled_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = tmp_path / "neuron" / "compiled" / "key" / "rank-0"
    monkeypatch.setenv(serve.COMPILED_VARIABLE, str(compiled))
    monkeypatch.setenv(serve.FRAMEWORK_VARIABLE, "stated by the plan")
    monkeypatch.setattr(vllm_serve, "main", lambda *_: 0)
    assert serve.main([], COMPLETE.get) == 0
    assert compiled.parent.is_dir()
    assert not compiled.exists()


def tensors(*ends: int) -> bytes:
    """A safetensors file of tensors that end there."""
    header = json.dumps({"__metadata__": {}, **{str(end): {"data_offsets": [0, end]} for end in ends}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(max(ends))


@pytest.fixture
def compiled(tmp_path: Path) -> Path:
    """A complete compiled model."""
    folder = tmp_path / "compiled" / "rank-0"
    (folder / "weights").mkdir(parents=True)
    (folder / "neuron_config.json").write_text("{}")
    (folder / "weights" / "tp0_sharded_checkpoint.safetensors").write_bytes(tensors(8, 40))
    with zipfile.ZipFile(folder / "model.pt", "w") as archive:
        archive.writestr("model/data.pkl", b"x" * 1000)
    return folder


def test_a_whole_compiled_model_is_kept(compiled: Path) -> None:
    serve.prepare_compiled(str(compiled))
    assert (compiled / "model.pt").exists()


@pytest.mark.parametrize("name", ["model.pt", "weights/tp0_sharded_checkpoint.safetensors"])
@pytest.mark.parametrize("kept_bytes", [0, 5, 60, -1])
def test_a_compiled_model_that_was_cut_short_is_compiled_again(
    compiled: Path, name: str, kept_bytes: int, capsys: pytest.CaptureFixture[str]
) -> None:
    (compiled / name).write_bytes((compiled / name).read_bytes()[:kept_bytes])
    serve.prepare_compiled(str(compiled))
    assert not compiled.exists()
    assert f"{name} is truncated: compiling again" in capsys.readouterr().err


def test_the_folder_of_quantized_weights_is_made_and_they_are_left_to_be_written(tmp_path: Path) -> None:
    weights = tmp_path / "quantized" / "llama" / "weights.pt"
    config = json.dumps({"override_neuron_config": {"quantized_checkpoints_path": str(weights)}})
    serve.prepare_quantized(["--", "--additional-config", config])
    assert weights.parent.is_dir()
    assert not weights.exists()
    serve.prepare_quantized(["--", "--seed", "1"])


def test_a_disk_that_refuses_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(serve.COMPILED_VARIABLE, str(tmp_path / "file" / "key" / "rank-0"))
    assert serve.main([], COMPLETE.get) == 1
    assert "cannot prepare NxDI's folders: " in capsys.readouterr().err
