"""The second half: only a known stack is started, in the way that it has. The stack itself cannot be had here."""

import subprocess
import sys
from pathlib import Path

import pytest

from engine_agent.engines.neuron import serve
from engine_agent.engines.neuron.target import NXDI_2_29, NeuronTarget, NoTarget, installed_target
from engine_agent.engines.vllm import serve as vllm_serve
from engine_agent.engines.vllm.options import parse
from engine_agent.engines.vllm.serve import EXIT_NO_VLLM, SHUTDOWN_TIMEOUT_S, Server, vllm_argv

pytestmark = pytest.mark.processes

COMPLETE = {"vllm-neuron": "0.5.0", "vllm": "0.16.0", "neuronx-distributed-inference": "0.9.17334"}
LINE = (
    "--node-id n-1 --cell c --generation 1 --rank 0 --role leader --host 10.0.0.1 --port 9403 --served-model m "
    "--model-dir /m --digest sha256:1 -- --tensor-parallel-size 32"
)
OPTIONS = parse(LINE.split(), {})


def test_the_first_target_is_found_by_its_distributions() -> None:
    assert installed_target(COMPLETE.get) is NXDI_2_29


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vllm-neuron": None}, r"vllm-neuron is not installed; install one of vllm-neuron 0.5.\* \(Neuron SDK 2.29\)"),
        ({"vllm-neuron": "0.24.0.1.1.0"}, r"vllm-neuron is 0.24.0.1.1.0; this agent starts vllm-neuron 0.5.\*"),
        ({"vllm": "0.11.0"}, r"vllm is 0.11.0; vllm-neuron 0.5.0 needs 0.16.\*"),
        ({"neuronx-distributed-inference": None}, r"neuronx-distributed-inference is not .* needs any version"),
    ],
)  # fmt: skip
def test_another_stack_says_what_it_is_and_what_would_do(changes: dict[str, str | None], said: str) -> None:
    with pytest.raises(NoTarget, match=said):
        installed_target({**COMPLETE, **changes}.get)


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
    serve.run_server(NeuronTarget("t", "0", {}, "stand_in_server", None), ["--seed", "1"], lambda: acts.append("last"))
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
