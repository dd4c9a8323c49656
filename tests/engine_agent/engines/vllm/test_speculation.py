"""Speculation from the registry's fields to a real engine: drafts are made and right, and no text changes."""

from pathlib import Path

import pytest

from engine_agent.protocol.messages import Artifact
from tests.engine_agent.engines.vllm.running_cell import PROMPTS, TOKENS, plan_of, running_cell

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]


def test_a_draft_model_speeds_a_version_up_and_changes_no_text(
    artifact: Artifact, texts: dict[str, str], tmp_path: Path
) -> None:
    itself = {"method": "draft_model", "tokens": 3, "draft_uri": artifact.uri, "draft_digest": artifact.digest}
    with running_cell(plan_of(artifact, speculation=itself), tmp_path / "logs", nodes=1) as engine:
        assert engine.texts(PROMPTS[::6], TOKENS).items() <= texts.items()
        drafts = engine.metric("vllm:spec_decode_num_drafts_total")
        assert engine.metric("vllm:spec_decode_num_accepted_tokens_total") / drafts > 2.0
