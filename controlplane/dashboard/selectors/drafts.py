"""The form of a draft: a field for each option of a version, with its present text and its error."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kernel.decoding import decode_json
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
NESTED = (
    "parallelism", "engine_options", "engine_env", "quantization", "speculation", "adapters", "roles", "by_type",
    "golden_prompts",
)  # fmt: skip
OPTIONAL = frozenset({"attention_heads", "kv_heads", "layers"})


class FieldKind(StrEnum):
    CHOICE = "choice"
    TEXT = "text"
    NUMBER = "number"
    JSON = "json"


@dataclass(frozen=True, slots=True)
class DraftField:
    """`text` is the present content, `options` the values of a choice."""

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
        return min(16, max(2, self.text.count("\n") + 1))


def draft_fields(
    version: ModelVersion, texts: Mapping[str, str] | None = None, errors: Mapping[str, str] | None = None
) -> tuple[DraftField, ...]:
    """Of the version as it is, or with the `texts` of a form that was sent; `errors` by field."""
    kinds = {"engine": FieldKind.CHOICE}
    kinds |= dict.fromkeys(TEXTS, FieldKind.TEXT) | dict.fromkeys(NUMBERS, FieldKind.NUMBER)
    kinds |= dict.fromkeys(NESTED, FieldKind.JSON)
    declared = ChangeDraftSerializer().fields
    return tuple(
        DraftField(
            name=name,
            kind=kind,
            text=texts[name] if texts and name in texts else _text(getattr(version, name), kind),
            help=str(declared[name].help_text or ""),
            error=(errors or {}).get(name, ""),
            options=tuple(ENGINES) if kind is FieldKind.CHOICE else (),
        )
        for name, kind in kinds.items()
    )


def parse_fields(texts: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """The values of a form as the API takes them, and, by field, why a text is no JSON."""
    values: dict[str, Any] = {}
    errors: dict[str, str] = {}
    for name, text in texts.items():
        if name in NESTED:
            try:
                values[name] = decode_json(text)
            except ValueError as error:
                errors[name] = f"not valid JSON: {error}"
        elif name in OPTIONAL and not text.strip():
            values[name] = None
        else:
            values[name] = text.strip()
    return values, errors


def _text(value: Any, kind: FieldKind) -> str:
    if kind is FieldKind.JSON:
        return json.dumps(value, indent=2, ensure_ascii=False)
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return "" if value is None else str(value)
