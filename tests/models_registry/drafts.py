from typing import Any

from models_registry.models import Model, ModelVersion
from models_registry.services.draft import draft_create
from tests.fleet.rows import NOW

SIM: dict[str, Any] = {
    "engine": "sim",
    "parallelism": {"local.cpu": {"nodes": 2}},
    "engine_options": {"decode_step_ms": 14},
    "golden_prompts": [{"prompt": "2 + 2 =", "expect": "4"}],
}


def draft(version: str = "1", *, based_on: str = "", **columns: Any) -> ModelVersion:
    """A draft of `toy` that needs no artifact and lacks nothing."""
    Model.objects.get_or_create(name="toy", defaults={"created_at": NOW})
    values = columns if based_on else {**SIM, **columns}
    return draft_create(model="toy", version=version, based_on=based_on, columns=values, actor="ada", now=NOW)


def stored(state: str, version: str = "1", **columns: Any) -> ModelVersion:
    """A version that is in this state already."""
    row = draft(version)
    ModelVersion.objects.filter(pk=row.pk).update(state=state, **columns)
    row.refresh_from_db()
    return row
