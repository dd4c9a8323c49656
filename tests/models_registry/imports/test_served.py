"""From a model's name to an answered prompt, and the proof that the hub of these tests speaks Hugging Face's API."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from engine_agent.engines.vllm.environment import install
from engine_agent.protocol.messages import Artifact
from models_registry.artifacts.planner import ArtifactLimits, parse_place
from models_registry.instance_types.planner import INSTANCE_TYPES
from models_registry.versions.models import ModelVersion
from models_registry.versions.planning.engine_arguments import render_engine_plan
from models_registry.versions.services.drafts import draft_change
from models_registry.versions.services.validation import Slice, validation_start, validations_advance
from tests.engine_agent.engines.one_node_cell import COMPLETIONS, artifact, running_cell
from tests.engine_agent.engines.vllm.running_cell import CACHE
from tests.fleet.rows import NOW
from tests.models_registry.imports.hub import COMMIT, FILES, TOKEN, local_hub
from tests.models_registry.imports.jobs import configured_hub, run, start

pytestmark = [pytest.mark.long, pytest.mark.vllm, pytest.mark.django_db, pytest.mark.timeout(600)]
__all__ = ["artifact"]

CLIENT = """
import os, sys
os.environ.update(HF_HUB_DISABLE_XET="1", HF_ENDPOINT=sys.argv[1], HF_HOME=sys.argv[2])
from huggingface_hub import HfApi, snapshot_download
api = HfApi(endpoint=sys.argv[1], token=sys.argv[3])
commit = api.model_info("org/model", revision="v1.0").sha
folder = snapshot_download("org/model", revision=commit, local_dir=sys.argv[2] + "/model", token=sys.argv[3])
found = api.verify_repo_checksums("org/model", revision=commit, local_dir=folder)
print(commit, found.checked_count, found.mismatches, found.missing_paths)
"""


def test_an_imported_gguf_answers_a_prompt(artifact: Artifact, settings: Any, tmp_path: Path) -> None:
    """Each step as an operator takes it: import with a draft, state where it runs, validate, start."""
    (weights,) = Path(artifact.uri.removeprefix("file://")).glob("*.gguf")
    with configured_hub(settings, tmp_path) as hub:
        hub.files = {"smol.Q4_1.gguf": weights.read_bytes(), "README.md": b"# A model"}
        row = run(start(draft="tiny@1"))
    assert row.state == "done", row.reason
    draft = ModelVersion.objects.get()
    columns = {
        "parallelism": {"local.cpu": {}},
        "golden_prompts": [{"prompt": "The capital of France is", "expect": "Paris"}],
    }
    draft_change(version_id=draft.pk, columns=columns, actor="ada", now=NOW)
    validation = validation_start(version_id=draft.pk, actor="ada", now=NOW)
    validations_advance(Slice((parse_place(settings.IMPORT_STORE),), ArtifactLimits(), lambda: NOW))
    validation.refresh_from_db()
    draft.refresh_from_db()
    assert (draft.engine, draft.state) == ("llama-cpp", "validated"), validation.reason
    plan = render_engine_plan(draft.spec(), INSTANCE_TYPES["local.cpu"])
    with running_cell(plan, tmp_path) as cell:
        found = cell.ask(COMPLETIONS, prompt="The capital of France is", max_tokens=4, temperature=0)
    assert found["choices"][0]["text"].startswith(" Paris")


def test_the_client_of_hugging_face_accepts_this_hub(tmp_path: Path) -> None:
    with local_hub() as hub:
        hub.gated, hub.page = True, 2
        command = [str(install(CACHE, print)), "-c", CLIENT, hub.url, str(tmp_path), TOKEN]
        ended = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    assert ended.stdout == f"{COMMIT} {len(FILES)} [] []\n"
