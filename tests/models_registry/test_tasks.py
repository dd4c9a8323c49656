"""The task reads its limits from the settings, and bad settings are errors at start."""

from pathlib import Path

import pytest
from pytest_django import Settings

from controlplane.celery import app
from models_registry.apps import check_artifact_sources
from models_registry.artifacts.planner import ArtifactLimits
from models_registry.tasks import HARD_LIMIT_S, SOFT_LIMIT_S, validate
from models_registry.versions.services.validation import LEASE_TTL_S, TASK, validation_start
from tests.fleet.rows import NOW
from tests.models_registry.rows import artifact, draft


@pytest.mark.django_db
def test_a_validation_reads_from_the_sources_in_the_settings(settings: Settings, tmp_path: Path) -> None:
    artifact(tmp_path / "toy")
    row = draft(
        engine="vllm", parallelism={"local.cpu": {}}, engine_options={}, artifact_uri=(tmp_path / "toy").as_uri()
    )
    settings.ARTIFACT_SOURCES = [tmp_path.as_uri()]
    settings.ARTIFACT_LIMIT_S = 10**9
    validation_start(version_id=row.pk, actor="ada", now=NOW)
    validate()
    row.refresh_from_db()
    assert row.state == "validated"


def test_a_bad_source_is_named(settings: Settings) -> None:
    settings.ARTIFACT_SOURCES = ["s3://models", "models"]
    (error,) = check_artifact_sources()
    assert error.msg.startswith("SWITCHYARD_ARTIFACT_SOURCES: 'models' is not an artifact URI")


def test_no_validation_outlives_the_brokers_patience() -> None:
    visibility_s = app.conf.broker_transport_options["visibility_timeout"]
    assert ArtifactLimits().file_s + LEASE_TTL_S < SOFT_LIMIT_S < HARD_LIMIT_S < visibility_s
    assert app.conf.beat_schedule["models-validate"]["task"] == TASK
