"""The form of a draft: a field for everything that it says, with what stands there now and what is wrong with it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from models_registry.api.version_requests import ChangeDraftSerializer
from models_registry.models import ModelVersion
from models_registry.planning.engine_arguments import ENGINES

NUMBERS = (
    "context_length",
    "max_concurrency",
    "ready_timeout_s",
    "attention_heads",
    "kv_heads",
    "layers",
)
TEXTS = ("artifact_uri", "artifact_digest", "golden_waiver")
NESTED = ("parallelism", "engine_options", "engine_env", "quantization", "speculation", "golden_prompts")
MAY_BE_UNSAID = frozenset({"attention_heads", "kv_heads", "layers"})


class FieldKind(StrEnum):
    CHOICE = "choice"
    TEXT = "text"
    NUMBER = "number"
    JSON = "json"


@dataclass(frozen=True, slots=True)
class DraftField:
    """`text` is what stands in the field, `options` what may, of a choice."""

    name: str
    kind: FieldKind
    text: str
    help: str
    error: str = ""
    options: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return self.name.replace("_", " ").capitalize()

    @property
    def lines(self) -> int:
        """Of a field of JSON."""
        return min(16, max(2, self.text.count("\n") + 1))


def draft_fields(
    version: ModelVersion, written: Mapping[str, str] | None = None, errors: Mapping[str, str] | None = None
) -> tuple[DraftField, ...]:
    """Of the version as it is, or as somebody `written` it; `errors` by field."""
    kinds = {"engine": FieldKind.CHOICE}
    kinds |= dict.fromkeys(TEXTS, FieldKind.TEXT) | dict.fromkeys(NUMBERS, FieldKind.NUMBER)
    kinds |= dict.fromkeys(NESTED, FieldKind.JSON)
    asked = ChangeDraftSerializer().fields
    return tuple(
        DraftField(
            name=name,
            kind=kind,
            text=written[name] if written and name in written else _text(getattr(version, name), kind),
            help=str(asked[name].help_text or ""),
            error=(errors or {}).get(name, ""),
            options=tuple(ENGINES) if kind is FieldKind.CHOICE else (),
        )
        for name, kind in kinds.items()
    )


def read_fields(written: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """What the form says as the API would say it, and, by field, what is no JSON."""
    said: dict[str, Any] = {}
    errors: dict[str, str] = {}
    for name, text in written.items():
        if name in NESTED:
            try:
                said[name] = json.loads(text)
            except ValueError as error:
                errors[name] = f"this is no JSON: {error}"
        elif name in MAY_BE_UNSAID and not text.strip():
            said[name] = None
        else:
            said[name] = text.strip()
    return said, errors


def _text(value: Any, kind: FieldKind) -> str:
    if kind is FieldKind.JSON:
        return json.dumps(value, indent=2, ensure_ascii=False)
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return "" if value is None else str(value)
