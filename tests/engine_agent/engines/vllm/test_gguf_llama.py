"""The demo model's configuration says the same to every library that reads it."""

import json
from pathlib import Path
from urllib.parse import urlparse

import pytest

from engine_agent.protocol.messages import Artifact

pytestmark = [pytest.mark.long, pytest.mark.vllm, pytest.mark.timeout(900)]


def test_the_base_of_rotary_embeddings_is_where_older_libraries_look_for_it(artifact: Artifact) -> None:
    config = json.loads((Path(urlparse(artifact.uri).path) / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 100_000
