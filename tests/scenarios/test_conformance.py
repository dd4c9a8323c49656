"""The Python clients of OpenAI and Anthropic, with all their features, on `sim` through an ingress."""

import os
import subprocess
import sys

import pytest

from bench.conformance.clients import SCRIPTS
from bench.conformance.results import results_of
from tests.scenarios.running_fleet import AskedFleet

pytestmark = [pytest.mark.long, pytest.mark.scenario, pytest.mark.anywhere, pytest.mark.timeout(900)]


@pytest.mark.parametrize(("script", "features"), [("openai_python.py", 18), ("anthropic_python.py", 9)])
def test_every_feature_of_a_third_party_client_works(fleet: AskedFleet, script: str, features: int) -> None:
    said = subprocess.run(
        [sys.executable, SCRIPTS / script],
        env={
            **os.environ,
            "CONFORMANCE_BASE_URL": f"{fleet.ingress()}/v1",
            "CONFORMANCE_MODEL": "sim-70b",
            "CONFORMANCE_KEY": "none",
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    results = results_of(script, "sim", said.stdout)
    assert [result for result in results if result.has_failed] == []
    assert len(results) == features
