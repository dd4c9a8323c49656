"""Celery tasks of the registry. They only call services."""

from celery import shared_task
from django.conf import settings

from kernel import clock
from models_registry.artifacts.planner import ArtifactLimits, parse_place
from models_registry.builds.services.uploads import uploads_trim
from models_registry.versions.services.validation import TASK, Slice, validations_advance

SOFT_LIMIT_S, HARD_LIMIT_S = 540, 570
"""Above the limit of one file (`ArtifactLimits.file_s`), below the broker's visibility timeout."""


@shared_task(name=TASK, soft_time_limit=SOFT_LIMIT_S, time_limit=HARD_LIMIT_S)
def validate() -> None:
    limits = ArtifactLimits(artifact_bytes=settings.ARTIFACT_MAX_GIB * 1024**3, validation_s=settings.ARTIFACT_LIMIT_S)
    validations_advance(Slice(tuple(map(parse_place, settings.ARTIFACT_SOURCES)), limits))


@shared_task(name="models_registry.trim_uploads")
def trim_uploads() -> None:
    uploads_trim(now=clock.now())
