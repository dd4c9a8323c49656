"""Adapters from the registry's fields to a real engine: each answers under its own name, as its weights say."""

import json
import random
from array import array
from pathlib import Path

import pytest

from engine_agent.engines.artifacts import describe_folder, write_manifest
from engine_agent.protocol.messages import Artifact
from tests.asking import CLIENT
from tests.engine_agent.engines.vllm.continuation.streams import marked
from tests.engine_agent.engines.vllm.continuation.test_real_continuation import check_cuts
from tests.engine_agent.engines.vllm.forks import Begin
from tests.engine_agent.engines.vllm.running_cell import PROMPTS, TOKENS, plan_of, running_cell

pytestmark = [pytest.mark.long, pytest.mark.vllm, pytest.mark.timeout(1800)]
RANK = 4


def random_adapter(folder: Path, model: Path, seed: int) -> Artifact:
    """A LoRA of the model's `down_proj` matrices whose both halves are random, so that it changes what is said.

    The format of its weights: https://huggingface.co/docs/safetensors, a header in JSON before the tensors.
    """
    config = json.loads((model / "config.json").read_text())
    source = random.Random(seed)
    header, tensors = {}, array("f")
    for layer in range(config["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.mlp.down_proj"
        sizes = {"A": (RANK, config["intermediate_size"]), "B": (config["hidden_size"], RANK)}
        for half, shape in sizes.items():
            begin = 4 * len(tensors)
            tensors.extend(source.gauss(0, 0.1) for _ in range(shape[0] * shape[1]))
            offsets = [begin, 4 * len(tensors)]
            header[f"{name}.lora_{half}.weight"] = {"dtype": "F32", "shape": shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + tensors.tobytes())
    stated = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["down_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(stated))
    manifest = describe_folder(folder, {})
    write_manifest(folder, manifest)
    return Artifact(f"file://{folder}", manifest.digest)


def test_each_adapter_answers_as_its_weights_say_and_the_model_as_without_them(
    small: Artifact, forked: Begin, texts: dict[str, str], tmp_path: Path
) -> None:
    model = Path(small.uri.removeprefix("file://"))
    made = {f"acme/{seed}": random_adapter(tmp_path / str(seed), model, seed) for seed in (1, 2)}
    stated = [
        {"name": name, "artifact_uri": each.uri, "artifact_digest": each.digest, "rank": RANK}
        for name, each in made.items()
    ]
    prompts = PROMPTS[::6]
    with running_cell(plan_of(small, adapters=stated), tmp_path / "logs", nodes=1, begin=forked) as engine:
        said = {
            name: tuple(engine.complete(model=name, prompt=prompt, max_tokens=TOKENS)["text"] for prompt in prompts)
            for name in ("smollm2", *made, *made)
        }
        body = {"model": "acme/1", "prompt": prompts[0], "max_tokens": TOKENS, "temperature": 0}
        whole = marked(engine.url, "/v1/completions", body)
        check_cuts("/v1/completions", body, whole, engine.url)
        listed = CLIENT.get(f"{engine.url}/v1/models").json()["data"]
        unknown = CLIENT.post(f"{engine.url}/v1/completions", json={"model": "acme/3", "prompt": "x"})
        load = {"lora_name": "x", "lora_path": made["acme/1"].uri.removeprefix("file://")}
        loading = CLIENT.post(f"{engine.url}/v1/load_lora_adapter", json=load)
    assert said["smollm2"] == tuple(texts[prompt] for prompt in prompts), "adapters change nothing for the model itself"
    assert len(set(said.values())) == 3
    assert whole.status == 200
    assert whole.groups, "streams of adapters have marks"
    assert [(each["id"], each["parent"]) for each in listed] == [
        ("smollm2", None),
        ("acme/1", "smollm2"),
        ("acme/2", "smollm2"),
    ]
    assert unknown.status_code == 404
    assert loading.status_code == 404, "the engine has no such path, whoever gets at it"
