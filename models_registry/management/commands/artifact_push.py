"""`manage.py artifact_push`: uploads a folder of model files to S3, the manifest last. It never reads or writes the
database."""

from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from engine_agent.protocol.manifest import BadArtifact
from models_registry.artifacts.planner import parse_place
from models_registry.artifacts.services.bucket import artifact_push
from models_registry.artifacts.services.sources import SourceTrouble


class Command(BaseCommand):
    help = (
        "Upload a folder of model files to an S3 prefix, the manifest last. Never overwrites an object. Uses "
        "your own AWS credentials, AWS_REGION and AWS_ENDPOINT_URL. Prints the artifact_digest of a model "
        "version."
    )
    requires_system_checks = []
    requires_migrations_checks = False

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("folder", type=Path, help="the folder to upload, with its subfolders")
        parser.add_argument("uri", help="target, s3://bucket/prefix, which must be empty")

    def handle(self, *args: Any, **options: Any) -> None:
        """Upload the folder. Raises CommandError if the folder is not a valid artifact, the prefix is taken, or S3
        refuses."""
        try:
            manifest = artifact_push(options["folder"], parse_place(options["uri"]), self.stderr.write)
        except (BadArtifact, SourceTrouble) as error:
            raise CommandError(str(error)) from error
        self.stdout.write(manifest.digest)
