"""A version that could not be served does not get into the registry."""

from typing import Any

import pytest

from models_registry.models import Model, ModelVersion
from models_registry.planning.instance_types import INSTANCE_TYPES
from models_registry.planning.version_spec import InvalidVersion
from models_registry.services.draft import version_register
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db

SERVABLE: dict[str, Any] = {
    "engine": "vllm",
    "artifact_uri": "file:///weights",
    "artifact_digest": "sha256:1",
    "attention_heads": 12,
    "kv_heads": 4,
    "parallelism": {"local.cpu": {"nodes": 2, "tp": 2}},
    "speculation": {"method": "ngram", "tokens": 3},
}


def register(**changes: Any) -> ModelVersion:
    model = Model.objects.create(name="smollm2", created_at=NOW)
    return version_register(model=model, version="1", machines=INSTANCE_TYPES, now=NOW, **{**SERVABLE, **changes})


def test_a_version_that_can_be_served_is_stored_as_it_was_said() -> None:
    stored = ModelVersion.objects.get(pk=register().pk)
    assert stored.spec().speculation == {"method": "ngram", "tokens": 3}
    assert (stored.attention_heads, stored.kv_heads, stored.layers) == (12, 4, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallelism": {}}, r"smollm2@1: parallelism is empty; it must name an instance type"),
        (
            {"parallelism": {"a1": {}}},
            r"names instance type 'a1'; there are c7i.2xlarge, g6.12xlarge, inf2.48xlarge, local.cpu",
        ),
        ({"parallelism": {"local.cpu": {"tp": 2}}}, r"local.cpu.tp is 2; .* do not fit: at most 1, or nodes = 2"),
        ({"attention_heads": 9}, r"local.cpu.tp is 2; it must divide 9 attention heads: none does on 2 nodes"),
        ({"speculation": {"method": "mtp"}}, r"speculation.method is 'mtp'; on engine vllm it must be one of"),
    ],
)
def test_a_version_that_cannot_be_served_is_refused_whole(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidVersion, match=message):
        register(**changes)
    assert not ModelVersion.objects.exists()
