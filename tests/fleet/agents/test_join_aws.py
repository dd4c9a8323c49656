"""The script of `/join/aws`, run by sh on a machine with a metadata service."""

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.test import Client

from fleet.agents.planner import read_proof
from tests.fleet.proofs import KEYS
from tests.layers import ROOT

METADATA = {
    "/v2/credentials/task": json.dumps(KEYS),
    "/latest/api/token": "token",
    "/latest/meta-data/iam/security-credentials/": "node",
    "/latest/meta-data/iam/security-credentials/node": json.dumps(KEYS),
    "/latest/meta-data/placement/region": "eu-west-1",
    "/latest/meta-data/local-ipv4": "10.1.16.4",
}
CURL = """#!/bin/sh
for last; do :; done
case "$last" in
  */agents/join/attest) cat >"$PROOF"; cat "$ANSWER" ;;
  */join) for one; do [ "$before" = -o ] && echo 'echo "$@" >"$TOLD"' >"$one"; before=$one; done ;;
esac
"""


@pytest.fixture
def metadata() -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = METADATA[self.path].encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_PUT(self) -> None:
            self.do_GET()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=[0.01], daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.slow
@pytest.mark.django_db
def test_it_proves_itself_and_joins_with_the_ticket(metadata: str, tmp_path: Path, settings: Any) -> None:
    settings.ALLOWED_HOSTS = ["control.example"]
    script = Client().get("/join/aws", secure=True, headers={"host": "control.example"}).content.decode()
    curl = tmp_path / "bin/curl"
    curl.parent.mkdir()
    curl.write_text(CURL)
    curl.chmod(0o755)
    answer, told, prefix = tmp_path / "answer", tmp_path / "told", tmp_path / "code"
    environment = {
        "PATH": f"{curl.parent}:{os.environ['PATH']}", "SWITCHYARD_PREFIX": str(prefix), "UNIT": "u-1",
        "AWS_EC2_METADATA_SERVICE_ENDPOINT": metadata, "PROOF": str(tmp_path / "proof"), "ANSWER": str(answer),
        "TOLD": str(told),
    }  # fmt: skip

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh"], input=script, env=environment, capture_output=True, text=True, check=False, timeout=60
        )

    answer.write_text('{"error": "the launch of i-1 is not recorded yet"}')
    refused = run()
    assert (refused.returncode, refused.stderr) == (1, "switchyard: the launch of i-1 is not recorded yet\n")
    nonce = Path(f"{prefix}.nonce").read_text()
    proof = read_proof((tmp_path / "proof").read_bytes())
    assert (proof.region, proof.host, proof.server) == (
        "eu-west-1", "sts.eu-west-1.amazonaws.com", "control.example",
    )  # fmt: skip
    answer.write_text('{"ticket": "sw_5e6f7a8b9c0d1e_secret"}')
    joined = run()
    assert joined.returncode == 0, joined.stderr
    assert told.read_text() == f"--nonce {prefix}.nonce sw_5e6f7a8b9c0d1e_secret\n"
    again = read_proof((tmp_path / "proof").read_bytes())
    assert again.nonce_digest == proof.nonce_digest
    assert nonce
    assert not Path(f"{prefix}.nonce").exists()
    (prefix / "current").mkdir(parents=True)
    assert run().stderr == "switchyard: this machine joined already\n"


@pytest.mark.slow
def test_a_task_of_ecs_proves_itself_by_the_keys_of_its_role(metadata: str, tmp_path: Path) -> None:
    environment = {
        "PATH": os.environ["PATH"], "SERVER": "https://127.0.0.1:8000", "STS_HOST": "sts.REGION.amazonaws.com",
        "UNIT": "u-1", "AWS_REGION": "eu-west-1", "AWS_CONTAINER_CREDENTIALS_ENDPOINT": metadata,
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI": "/v2/credentials/task",
        "AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://127.0.0.1:1",
    }  # fmt: skip
    command = [sys.executable, "templates/aws/attest.py", str(tmp_path / "nonce")]
    done = subprocess.run(command, env=environment, capture_output=True, check=True, cwd=ROOT, timeout=60)

    made = read_proof(done.stdout)
    assert (made.unit, made.address, made.region) == ("u-1", "127.0.0.1", "eu-west-1")
    assert made.host == "sts.eu-west-1.amazonaws.com"
