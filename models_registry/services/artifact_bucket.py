"""Artifacts in S3, read to be checked. Talks to the one host that its first request went to, and follows no redirect:
a bucket of another region is an error that says so."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

from engine_agent.protocol.manifest import MANIFEST_NAME, BadArtifact
from kernel.outside_transaction import refuse_inside_transaction
from models_registry.planning.artifact_rules import ArtifactLimits, Place
from models_registry.services.artifact_source import CHUNK_BYTES, SourceTrouble

CONNECT_TIMEOUT_S = 5
READ_TIMEOUT_S = 10
ATTEMPTS = 2
"""Of botocore, on one request. The validation itself tries again later."""


class BucketSource:
    """An artifact under a prefix of a bucket. Credentials, region and endpoint are boto3's own settings."""

    def __init__(self, place: Place, limits: ArtifactLimits) -> None:
        self._place, self._limits = place, limits
        timeouts = {"connect_timeout": CONNECT_TIMEOUT_S, "read_timeout": READ_TIMEOUT_S}
        config = Config(retries={"total_max_attempts": ATTEMPTS, "mode": "standard"}, **timeouts)
        with self._explained(MANIFEST_NAME):
            self._client = boto3.client("s3", config=config)
        self._client.meta.events.register("before-send.s3", one_host())

    def manifest(self) -> bytes:
        with self._explained(MANIFEST_NAME):
            answer = self._client.get_object(Bucket=self._place.host, Key=self._key(MANIFEST_NAME))
            if answer["ContentLength"] > self._limits.manifest_bytes:
                raise BadArtifact(
                    f"{self._place}/{MANIFEST_NAME} has {answer['ContentLength']} bytes; "
                    f"at most {self._limits.manifest_bytes} may be"
                )
            return bytes(answer["Body"].read(self._limits.manifest_bytes))

    def sizes(self) -> dict[str, int]:
        start, sizes = self._key(""), dict[str, int]()
        with self._explained(""):
            pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._place.host, Prefix=start)
            for page in pages:
                sizes |= {item["Key"][len(start) :]: item["Size"] for item in page.get("Contents", ())}
                if len(sizes) > self._limits.files + 1:
                    raise BadArtifact(f"{self._place} holds more than {self._limits.files} files")
        # Consoles make an empty object for a folder; it is no file of the artifact.
        return {path: size for path, size in sizes.items() if path != MANIFEST_NAME and not path.endswith("/") and path}

    def chunks(self, path: str) -> Iterator[bytes]:
        with self._explained(path):
            body = self._client.get_object(Bucket=self._place.host, Key=self._key(path))["Body"]
            with body:
                yield from body.iter_chunks(CHUNK_BYTES)

    def _key(self, path: str) -> str:
        return f"{self._place.path}/{path}" if self._place.path else path

    @contextmanager
    def _explained(self, path: str) -> Iterator[None]:
        where = f"{self._place}/{path}".rstrip("/")
        refuse_inside_transaction(f"reading {where}")
        try:
            yield
        except ClientError as error:
            raise _explain(error, where, self._place.host) from error
        except NoCredentialsError as error:
            raise BadArtifact(f"{where}: the control plane has no AWS credentials to read it with") from error
        except BotoCoreError as error:
            raise SourceTrouble(f"{where}: {error}") from error


def one_host() -> Callable[..., None]:
    """A handler of botocore's `before-send` that lets requests go to one host alone, that of the first. It raises
    `BadArtifact` for any other."""
    first: list[str] = []

    def check(request: Any, **_: Any) -> None:
        host = urlsplit(request.url).netloc
        first[:] = first or [host]
        if host != first[0]:
            raise BadArtifact(f"a redirect from {first[0]} to {host} is not followed")

    return check


def _explain(error: ClientError, where: str, bucket: str) -> Exception:
    code = str(error.response["Error"]["Code"])
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    if code in ("NoSuchBucket", "InvalidBucketName"):
        return BadArtifact(f"there is no bucket {bucket}")
    if code in ("NoSuchKey", "404"):
        how = ": upload the artifact by manage.py artifact_push" if where.endswith(MANIFEST_NAME) else ""
        return BadArtifact(f"{where} is not there{how}")
    if status in (301, 302, 307, 308) or code in ("PermanentRedirect", "AuthorizationHeaderMalformed"):
        region = error.response["ResponseMetadata"].get("HTTPHeaders", {}).get("x-amz-bucket-region", "another region")
        return BadArtifact(f"bucket {bucket} is in {region}; redirects are not followed: set AWS_REGION to it")
    if status in (401, 403):
        return BadArtifact(f"the control plane may not read {where}: it needs s3:GetObject and s3:ListBucket there")
    return SourceTrouble(f"{where}: S3 answered {code} ({status})")
