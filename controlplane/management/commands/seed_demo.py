"""Records the demo fleet; agents and cells follow from it by themselves."""

import os
from typing import Any

from django.conf import settings
from django.core.management import call_command
from django.core.management.base import CommandError, CommandParser

from audit.commands import AuditedCommand
from fleet.models import Region
from fleet.providers.aws.install import install_ensure
from fleet.services.cloud_region import AWS
from fleet.services.demo import CELLS, Weights, demo_seed
from kernel import clock
from traffic.services.ingress import ingress_create

PASSWORD_VARIABLE = "SWITCHYARD_OPERATOR_PASSWORD"  # noqa: S105 - the name of a variable


class Command(AuditedCommand):
    help = "Record the demo fleet: two regions, smollm2 and sim-70b. Running it again keeps what operators changed."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--engine", choices=["vllm", "sim"], default="vllm", help="what serves smollm2")
        parser.add_argument("--provider", choices=list(CELLS), default="local", help="who runs its nodes")
        parser.add_argument("--artifact-uri", default="", help="where the weights of smollm2 lie (engine vllm)")
        parser.add_argument("--artifact-digest", default="", help="their digest, sha256:<hex> (engine vllm)")

    def handle(self, *args: Any, **options: Any) -> None:
        weights = None
        if options["engine"] == "vllm":
            if not (options["artifact_uri"] and options["artifact_digest"]):
                raise CommandError("--engine vllm needs --artifact-uri and --artifact-digest of the weights")
            weights = Weights(uri=options["artifact_uri"], digest=options["artifact_digest"])
        now, port = clock.now(), settings.SWITCHYARD_INGRESS_PORT
        demo_seed(weights=weights, ingress_port=port, now=now, provider=options["provider"])
        for region in Region.objects.filter(provider="local"):
            ingress_create(region=region, address="127.0.0.1", port=port + region.position, now=now)
        if options["provider"] == AWS:  # whoever deploys the stacks has to name it
            (settings.SWITCHYARD_HOME / "install-id").write_text(install_ensure(now).id)
        if PASSWORD_VARIABLE in os.environ:
            token_file = settings.SWITCHYARD_HOME / "operator-token"
            call_command("ensure_operator", password_env=PASSWORD_VARIABLE, token_file=token_file)
        self.stdout.write("demo fleet recorded")
