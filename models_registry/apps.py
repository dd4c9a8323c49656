"""Registers the registry with Django and checks its settings: a bad artifact source stops the start, not the first
validation."""

from typing import Any

from django.apps import AppConfig
from django.conf import settings
from django.core.checks import CheckMessage, Error, register

from engine_agent.protocol.manifest import BadArtifact
from models_registry.artifacts.planner import check_source, parse_place


def check_artifact_sources(**_: Any) -> list[CheckMessage]:
    """Returns an error for each source that is not a valid artifact URI, and for a store outside the sources."""
    errors: list[CheckMessage] = []
    for source in settings.ARTIFACT_SOURCES:
        try:
            parse_place(source)
        except BadArtifact as error:
            errors.append(Error(f"SWITCHYARD_ARTIFACT_SOURCES: {error}", id="models_registry.E001"))
    if settings.IMPORT_STORE and not errors:
        try:
            check_source(parse_place(settings.IMPORT_STORE), map(parse_place, settings.ARTIFACT_SOURCES))
        except BadArtifact as error:
            errors.append(Error(f"SWITCHYARD_IMPORT_STORE: {error}", id="models_registry.E002"))
    if settings.COMPILE_CACHES.startswith("s3://"):
        try:
            parse_place(settings.COMPILE_CACHES)
        except BadArtifact as error:
            errors.append(Error(f"SWITCHYARD_COMPILE_CACHES: {error}", id="models_registry.E003"))
    return errors


class ModelsRegistryConfig(AppConfig):
    name = "models_registry"
    verbose_name = "Model registry"

    def ready(self) -> None:
        from accounts.services.approval import fleet_action_register
        from models_registry.versions.services.drafts import WIDEN

        fleet_action_register(WIDEN)
        register(check_artifact_sources)
