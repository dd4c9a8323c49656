"""The trainer on a model of one layer: from a folder to an artifact, and on from where it was ended."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from engine_agent.engines.artifacts import verify_folder
from engine_agent.engines.vllm.environment import install
from engine_agent.protocol.messages import Artifact
from models_registry.speculation.planner import read_calibration, task_figures
from tests.engine_agent.engines.vllm.running_cell import CACHE, ROOT, padded_artifact

pytestmark = [pytest.mark.long, pytest.mark.vllm, pytest.mark.timeout(1800)]

LIMIT_S = 600.0
TINY = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, vocab_size=49152, tie_word_embeddings=True, eos_token_id=2)).save_pretrained(sys.argv[1])
"""


@pytest.fixture(scope="module")
def python() -> Path:
    return install(CACHE, print)


@pytest.fixture(scope="module")
def model(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, and the demo model's tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    subprocess.run([str(python), "-c", TINY, str(folder)], check=True, timeout=LIMIT_S, capture_output=True)
    whole = Path(padded_artifact(python).uri.removeprefix("file://"))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(whole / name, folder)
    return folder


def trained(python: Path, model: Path, output: Path, *more: str) -> "subprocess.CompletedProcess[str]":
    command = [
        str(python),
        "-m",
        "engine_agent.engines.medusa",
        "train",
        "--model",
        str(model),
        "--output",
        str(output),
    ]
    few = ("--share", "0.02", "--epochs", "2", "--heads", "2", "--vocabulary", "128", "--batch", "8")
    return subprocess.run(
        [*command, *few, *more], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def test_heads_are_trained_judged_and_written_and_a_run_that_was_ended_goes_on(
    python: Path, model: Path, tmp_path: Path
) -> None:
    ended = trained(python, model, tmp_path, "--limit-s", "0")
    assert ended.returncode == 75, ended.stderr
    assert "run it again to continue" in ended.stdout
    done = trained(python, model, tmp_path)
    assert done.returncode == 0, done.stderr
    made = Artifact(**json.loads(done.stdout.splitlines()[-1]))
    folder = Path(made.uri.removeprefix("file://"))
    verify_folder(folder, made.digest)
    config = json.loads((folder / "config.json").read_text())
    assert (config["num_heads"], config["truncated_vocab_size"], config["vocab_size"]) == (2, 128, 49152)
    calibration = read_calibration(json.loads((folder / "calibration.json").read_text()))
    assert [task.name for task in calibration.tasks] == ["chat", "plan"]
    assert all(1.0 <= each <= 3.0 for task in calibration.tasks for each in task_figures(task).chain)
    again = trained(python, model, tmp_path)
    assert json.loads(again.stdout.splitlines()[-1])["digest"] == made.digest, "the same answers, the same heads"
    assert "part 1" not in again.stdout, "nothing is answered twice"


def test_parts_of_another_run_are_refused_by_name(python: Path, model: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "of.json").write_text("{}")
    refused = trained(python, model, tmp_path, "--work", str(work))
    assert refused.returncode == 1
    assert "belongs to another model or other options" in refused.stderr
