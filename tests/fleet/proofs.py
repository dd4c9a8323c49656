"""Proofs as machines make them, without a machine: keys and time are the test's."""

import hashlib
import json
import runpy
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.fleet.rows import NOW

ATTEST = Path(__file__).parents[2] / "templates/aws/attest.py"
SERVER = "control.example:8443"
HOST = "sts.us-east-1.amazonaws.com"
NONCE = "ab" * 32
KEYS = {"AccessKeyId": "ASIA" + "X" * 16, "SecretAccessKey": "secret", "Token": "dG9rZW4="}


def digest_of(nonce: str) -> str:
    return hashlib.sha256(nonce.encode()).hexdigest()


def proof(
    *, nonce: str = NONCE, server: str = SERVER, host: str = HOST, region: str = "us-east-1", at: datetime = NOW,
    unit: str = "u-1", address: str = "10.1.16.4",
) -> dict[str, Any]:  # fmt: skip
    attest = runpy.run_path(str(ATTEST))
    headers = attest["signed"](KEYS, region, host, f"{server};{digest_of(nonce)}", at.timestamp())
    del headers["content-type"]
    return {"unit": unit, "address": address, "headers": headers}


def body_of(proof: dict[str, Any]) -> bytes:
    return json.dumps(proof).encode()
