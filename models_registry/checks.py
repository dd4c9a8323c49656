"""Django's system check of the registry's settings: a bad source is named at start-up, not at the first validation."""

from typing import Any

from django.conf import settings
from django.core.checks import CheckMessage, Error

from engine_agent.protocol.manifest import BadArtifact
from models_registry.planning.artifact_rules import parse_place


def check_artifact_sources(**_: Any) -> list[CheckMessage]:
    """An error for each source that is no place of artifacts."""
    errors: list[CheckMessage] = []
    for source in settings.ARTIFACT_SOURCES:
        try:
            parse_place(source)
        except BadArtifact as error:
            errors.append(Error(f"SWITCHYARD_ARTIFACT_SOURCES: {error}", id="models_registry.E001"))
    return errors
