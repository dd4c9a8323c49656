"""Proves which machine of EC2 or task of ECS this is: signs a question to STS with the keys of its role, sends it
nowhere, and prints it. The control plane of SERVER asks it in our place, and STS answers whose keys they are.

    python3 attest.py NONCE_FILE, with SERVER, STS_HOST and UNIT in the environment

The signature covers the name of that server and the digest of a nonce, which is drawn once and kept in NONCE_FILE: the
proof is worth nothing to another server, and nothing to who does not know the nonce. Needs Python 3.9, nothing else.
"""

import hashlib
import hmac
import http.client
import json
import os
import secrets
import socket
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

METADATA = urlsplit(os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://169.254.169.254"))
TASK_KEYS = urlsplit(os.environ.get("AWS_CONTAINER_CREDENTIALS_ENDPOINT", "http://169.254.170.2"))
"""Where ECS gives a task the keys of its role, under AWS_CONTAINER_CREDENTIALS_RELATIVE_URI."""
METADATA_LIMIT_S = 5.0
METADATA_BYTES = 64 * 1024
TOKEN_S = 60
BODY = "Action=GetCallerIdentity&Version=2011-06-15"
CONTENT_TYPE = "application/x-www-form-urlencoded; charset=utf-8"


class NoProof(Exception):
    pass


def metadata(method: str, path: str, headers: dict[str, str]) -> str:
    """What the instance's metadata service answers.

    Raises:
        NoProof: nothing, or no 200.
    """
    connection = http.client.HTTPConnection(METADATA.hostname or "", METADATA.port, timeout=METADATA_LIMIT_S)
    try:
        connection.request(method, f"/latest/{path}", headers=headers)
        answer = connection.getresponse()
        body = answer.read(METADATA_BYTES).decode()
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise NoProof(f"the metadata service of this instance does not answer: {error}") from None
    finally:
        connection.close()
    if answer.status != http.client.OK:
        raise NoProof(f"the metadata service of this instance answered {answer.status} to {path}")
    return body


def of_task(path: str) -> "tuple[dict[str, str], str, str]":
    """Keys, region and address of this task. It has the network of its host, whose metadata it does not need.

    Raises:
        NoProof: ECS gives no keys.
    """
    connection = http.client.HTTPConnection(TASK_KEYS.hostname or "", TASK_KEYS.port, timeout=METADATA_LIMIT_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read(METADATA_BYTES).decode()
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise NoProof(f"the ECS agent of this host gives no keys: {error}") from None
    finally:
        connection.close()
    if answer.status != http.client.OK:
        raise NoProof(f"the ECS agent of this host answered {answer.status}")
    server = urlsplit(os.environ["SERVER"])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as towards:
        towards.connect((server.hostname, server.port or 443))  # sends nothing
        return json.loads(body), os.environ["AWS_REGION"], towards.getsockname()[0]


def of_instance() -> "tuple[dict[str, str], str, str]":
    """Keys, region and address of this instance.

    Raises:
        NoProof: the metadata service lacks a needed value.
    """
    for_s = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_S)}
    token = {"X-aws-ec2-metadata-token": metadata("PUT", "api/token", for_s)}
    role = metadata("GET", "meta-data/iam/security-credentials/", token).strip()
    keys = json.loads(metadata("GET", f"meta-data/iam/security-credentials/{role}", token))
    region = metadata("GET", "meta-data/placement/region", token)
    return keys, region, metadata("GET", "meta-data/local-ipv4", token)


def kept_nonce(path: Path) -> str:
    """The nonce of this machine: from the file, or drawn and stored before it is sent."""
    if path.exists() and (known := path.read_text(encoding="ascii").strip()):
        return known
    nonce = secrets.token_hex(32)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
        file.write(f"{nonce}\n")
        file.flush()
        os.fsync(file.fileno())
    return nonce


def signed(keys: dict[str, str], region: str, host: str, server: str, at: float) -> dict[str, str]:
    """The headers of the request, by Signature Version 4; `at` is seconds since 1970."""
    date = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(at))
    headers = {
        "content-type": CONTENT_TYPE,
        "host": host,
        "x-amz-date": date,
        "x-amz-security-token": keys["Token"],
        "x-switchyard-server": server,
    }
    names, scope = ";".join(headers), f"{date[:8]}/{region}/sts/aws4_request"
    lines = "".join(f"{name}:{value}\n" for name, value in headers.items())
    request = f"POST\n/\n\n{lines}\n{names}\n{_sha256(BODY)}"
    key = f"AWS4{keys['SecretAccessKey']}".encode()
    for part in (*scope.split("/"), f"AWS4-HMAC-SHA256\n{date}\n{scope}\n{_sha256(request)}"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    credential = f"Credential={keys['AccessKeyId']}/{scope}"
    headers["authorization"] = f"AWS4-HMAC-SHA256 {credential}, SignedHeaders={names}, Signature={key.hex()}"
    return headers


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def proof(nonce_file: Path) -> dict[str, object]:
    """Returns the evidence of this instance or task for the control plane.

    Raises:
        NoProof: a needed value is missing.
    """
    path = os.environ.get("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "")
    keys, region, address = of_task(path) if path else of_instance()
    host = os.environ["STS_HOST"].replace("REGION", region)
    server = f"{urlsplit(os.environ['SERVER']).netloc};{_sha256(kept_nonce(nonce_file))}"
    headers = signed(keys, region, host, server, time.time())
    del headers["content-type"]  # always the same
    return {"unit": os.environ["UNIT"], "address": address, "headers": headers}


def main() -> int:
    try:
        sys.stdout.write(json.dumps(proof(Path(sys.argv[1]))))
    except (NoProof, OSError, ValueError, KeyError) as error:
        sys.stderr.write(f"switchyard: this machine cannot prove which one it is: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
