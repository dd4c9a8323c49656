"""Records the demo fleet. The controller starts its agents and cells."""

import os
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from django.conf import settings
from django.core.management import call_command
from django.core.management.base import CommandError, CommandParser

from audit.commands import AuditedCommand
from engine_agent.protocol.manifest import MANIFEST_NAME, BadArtifact, parse_manifest
from engine_agent.protocol.messages import Artifact
from engine_agent.protocol.ports import local_ingress_port
from engine_agent.protocol.strict_json import strict_loads
from fleet.clouds.aws.identity import install_ensure
from fleet.clouds.services.regions import AWS
from fleet.deployments.models import Deployment
from fleet.deployments.services.demo import CELLS, Heads, Weights, demo_seed
from fleet.regions.models import Region
from kernel import clock
from models_registry.artifacts.planner import ArtifactLimits, parse_place
from models_registry.artifacts.services.sources import SourceTrouble, artifact_open
from models_registry.versions.services.validation import checkpoint_store
from traffic.region_shares.models import TrafficRule
from traffic.region_shares.services.overrides import traffic_policies_change
from traffic.routing.services.ingresses import ingress_create

PASSWORD_VARIABLE = "SWITCHYARD_OPERATOR_PASSWORD"  # noqa: S105 - the name of a variable
HEADS = "medusa-smollm2-135m-instruct-*"
"""Folders that `make heads` writes next to the weights. Its measurements have the folder's name and `.json`."""


def heads_beside(uri: str, digest: str) -> Heads | None:
    """The newest heads that were trained for these weights, or None."""
    folder = Path(unquote(urlsplit(uri).path)).parent
    for found in sorted(folder.glob(HEADS), key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            calibration = strict_loads((found / "calibration.json").read_bytes())
            if calibration["model"] != digest:
                continue
            cost = found.with_name(f"{found.name}.json")
            step_cost = strict_loads(cost.read_bytes()) if cost.exists() else None
            manifest = parse_manifest((found / MANIFEST_NAME).read_bytes(), str(found))
            return Heads(found.as_uri(), manifest.digest, calibration, step_cost)
        except (BadArtifact, OSError, ValueError, KeyError, TypeError):
            continue  # half of one, or none
    return None


def read_checkpoint(weights: Weights, now: datetime) -> None:
    """Stores the dimensions of the demo's weights, for the pages of its versions: those are released without
    validation, which reads them otherwise. Weights that cannot be read have no arithmetic there."""
    with suppress(BadArtifact, SourceTrouble, OSError):
        artifact, source = Artifact(weights.uri, weights.digest), parse_place(weights.uri)
        checkpoint_store(artifact_open(artifact, (source,), ArtifactLimits()), now)


def continue_streams(now: datetime) -> None:
    """Lets the streams of the demo's deployments continue at other cells. A deployment with a policy keeps it."""
    stated = TrafficRule.objects.values("deployment_id")
    names = Deployment.objects.exclude(name__in=stated).values_list("name", flat=True)
    traffic_policies_change(stated={name: {"continuation": True} for name in names}, actor="make up", now=now)


def _create_ingresses(port: int, each: int, now: datetime) -> None:
    regions = list(Region.objects.filter(provider="local"))
    places = max((region.position + 1 for region in regions), default=0)
    for region in regions:
        for number in range(each):
            at = local_ingress_port(port, region.position, places, number)
            ingress_create(region=region, address="127.0.0.1", port=at, now=now, number=number)


class Command(AuditedCommand):
    help = "Record the demo fleet: two regions, smollm2 and sim-70b. Running it again keeps what operators changed."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--engine", choices=["vllm", "llama-cpp", "triton", "sim"], default="vllm", help="what serves smollm2"
        )
        parser.add_argument("--provider", choices=list(CELLS), default="local", help="who runs its nodes")
        parser.add_argument("--artifact-uri", default="", help="where the weights of smollm2 lie (not for engine sim)")
        parser.add_argument("--artifact-digest", default="", help="their digest, sha256:<hex> (not for engine sim)")

    def handle(self, *args: Any, **options: Any) -> None:
        weights = None
        if (engine := options["engine"]) != "sim":
            if not (options["artifact_uri"] and options["artifact_digest"]):
                raise CommandError(f"--engine {engine} needs --artifact-uri and --artifact-digest of the weights")
            uri, digest = options["artifact_uri"], options["artifact_digest"]
            heads = heads_beside(uri, digest) if engine == "vllm" else None
            weights = Weights(uri=uri, digest=digest, engine=engine, heads=heads)
        now, port = clock.now(), settings.SWITCHYARD_INGRESS_PORT
        demo_seed(weights=weights, ingress_port=port, now=now, provider=options["provider"])
        continue_streams(now)
        if weights is not None:
            read_checkpoint(weights, now)
        _create_ingresses(port, settings.SWITCHYARD_INGRESSES, now)
        if options["provider"] == AWS:  # the deployment of the stacks needs it
            (settings.SWITCHYARD_HOME / "install-id").write_text(install_ensure(now).id)
        if PASSWORD_VARIABLE in os.environ:
            token_file = settings.SWITCHYARD_HOME / "operator-token"
            call_command("ensure_operator", password_env=PASSWORD_VARIABLE, token_file=token_file)
        self.stdout.write("demo fleet recorded")
