"""The wizard of model versions, for a new draft and for changes to one. Inputs are grouped by intent; proposals from
the checkpoint's dimensions prefill the split. Decides nothing: documents are checked and applied by services."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from django.urls import reverse

from controlplane.api.apply.planning import Kind
from controlplane.dashboard.fragments import PageRequest, found_or_404
from controlplane.dashboard.wizards import (
    Documents,
    Facts,
    Input,
    InputKind,
    Option,
    Step,
    Typed,
    Values,
    Wizard,
    document,
    nested,
)
from engine_agent.protocol.request_bodies import Modality
from fleet.nodes.selectors import spare_nodes
from kernel.decoding import decode_json
from models_registry.builds.models import EngineBuild
from models_registry.instance_types.planner import LOCAL_CPU
from models_registry.instance_types.selectors import instance_shapes
from models_registry.versions.models import Model, ModelVersion
from models_registry.versions.pages.data import version_find
from models_registry.versions.planning.engine_arguments import ENGINES
from models_registry.versions.planning.lifecycle import evaluate_version
from models_registry.versions.planning.machines import NAMES, WITHIN
from models_registry.versions.planning.proposals import PROPOSED_ENGINES, Proposal, propose
from models_registry.versions.planning.spec import NEURON_DTYPES, NEURON_SCHEMES
from models_registry.versions.planning.speculation import Method
from models_registry.versions.selectors import stored_checkpoints

PLAIN = (
    "engine", "engine_build", "artifact_uri", "artifact_digest", "context_length", "max_concurrency", "ready_timeout_s",
    "attention_heads", "kv_heads", "layers", "golden_waiver",
)  # fmt: skip
EMPTY: Mapping[str, Any] = {
    **dict.fromkeys(("engine_build", "artifact_uri", "artifact_digest", "golden_waiver"), ""),
    **dict.fromkeys(("attention_heads", "kv_heads", "layers")),
    **{name: {} for name in ("parallelism", "engine_options", "engine_env", "speculation", "quantization")},
    **{name: {} for name in ("roles", "by_type")},
    **{name: [] for name in ("adapters", "golden_prompts", "modalities")},
}
"""Values that clear a field of a draft."""
SPECULATION = ("method", "tokens", "draft_uri", "draft_digest", "lookup_min", "lookup_max")
QUANTIZATION = ("method", "dtype", "scheme", "checkpoints_path")
SPLIT = (*NAMES, WITHIN)
PROPOSED = 12
"""Proposals that are shown: first those of types with nodes in the fleet, then the cheapest."""


# --- documents -------------------------------------------------------------------------------------------------------


def _version_documents(values: Values) -> Documents:
    """An empty input is stated only where it clears a value of the draft, or of the version that is copied."""
    name, base = f"{values['model']}@{values['version']}", _base(values)
    spec = nested(values, ("based_on", *PLAIN)) | {key: value for key, value in _nested_fields(values) if value}
    if base is not None:
        spec |= {key: empty for key, empty in EMPTY.items() if key not in spec and getattr(base, key) != empty}
    spec |= nested(values, ("validate",))
    model = [] if Model.objects.filter(name=values["model"]).exists() else [document(Kind.MODEL, values["model"], {})]
    return [*model, document(Kind.MODEL_VERSION, name, spec)]


def _base(values: Values) -> ModelVersion | None:
    return version_find(str(values.get("based_on") or f"{values['model']}@{values['version']}"))


def _nested_fields(values: Values) -> Iterator[tuple[str, Any]]:
    rows = values.get("parallelism", [])
    yield "parallelism", {row["type"]: {name: row[name] for name in SPLIT if name in row} for row in rows}
    yield "engine_options", {row["option"]: _option(row.get("value", "")) for row in values.get("engine_options", [])}
    yield "engine_env", {row["variable"]: row.get("value", "") for row in values.get("engine_env", [])}
    for field, names in (("speculation", SPECULATION), ("quantization", QUANTIZATION)):
        stated = nested(values, tuple(f"{field}.{name}" for name in names)).get(field, {})
        yield field, {**stated, **values.get(f"{field}.more", {})}
    yield "adapters", values.get("adapters", [])
    yield "golden_prompts", values.get("golden_prompts", [])
    yield "modalities", [name.value for name in Modality if values.get(f"modalities.{name}")]
    yield "roles", values.get("roles", {})
    yield "by_type", values.get("by_type", {})


def _option(text: str) -> Any:
    """Options are written as in JSON; other texts are texts."""
    try:
        return decode_json(text)
    except ValueError:
        return text


def _option_text(value: Any) -> str:
    return value if isinstance(value, str) and _option(value) == value else json.dumps(value, ensure_ascii=False)


# --- texts of a version ----------------------------------------------------------------------------------------------


def _texts(version: ModelVersion) -> dict[str, str]:
    """The form of this version."""
    texts = {name: _plain_text(getattr(version, name)) for name in PLAIN}
    split = [{"type": kind, **degrees} for kind, degrees in sorted(version.parallelism.items())]
    options = [{"option": key, "value": _option_text(value)} for key, value in version.engine_options.items()]
    variables = [{"variable": key, "value": value} for key, value in version.engine_env.items()]
    for name, rows in (
        ("parallelism", split),
        ("engine_options", options),
        ("engine_env", variables),
        ("adapters", version.adapters),
        ("golden_prompts", version.golden_prompts),
    ):
        texts |= _row_texts(name, rows)
    for field, names in (("speculation", SPECULATION), ("quantization", QUANTIZATION)):
        stated = getattr(version, field)
        texts |= {f"{field}.{name}": _plain_text(stated[name]) for name in names if name in stated}
        texts[f"{field}.more"] = _json_text({key: value for key, value in stated.items() if key not in names})
    texts |= {f"modalities.{name}": "on" for name in version.modalities}
    return texts | {"roles": _json_text(version.roles), "by_type": _json_text(version.by_type)}


def _row_texts(name: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    return {
        f"{name}-{index}-{column}": _plain_text(value)
        for index, row in enumerate(rows)
        for column, value in row.items()
    }


def _plain_text(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return "" if value is None else str(value)


def _json_text(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) if value else ""


def _start_new(request: PageRequest) -> dict[str, str]:
    """`based_on` in the URL copies a version."""
    base = version_find(request.text("based_on")) if request.text("based_on") else None
    if base is None:
        return {}
    return {**_texts(base), "model": base.model_id, "version": _next_name(base), "based_on": base.reference}


def _next_name(base: ModelVersion) -> str:
    """The number after the greatest one, if versions are numbered."""
    names = ModelVersion.objects.filter(model_id=base.model_id).values_list("version", flat=True)
    return str(max(int(name) for name in names if name.isdecimal()) + 1) if base.version.isdecimal() else ""


def _start_edit(request: PageRequest) -> dict[str, str]:
    """The draft; without a split, with the best proposal."""
    version = found_or_404(version_find(request.key), f"model version {request.key!r}")
    texts = {**_texts(version), "model": version.model_id, "version": version.version}
    if not version.parallelism and (found := _proposals(version)):
        chosen = {} if version.engine in PROPOSED_ENGINES else {"engine": version.engine}
        texts |= _proposed(found[0][0], 0) | chosen
    return texts


# --- proposals -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Proposed:
    """`rows`: fitting proposals with spare nodes of their type. `problem`: why there are none."""

    rows: tuple[tuple[Proposal, int], ...] = ()
    problem: str = ""


def _typed_version(typed: Typed) -> ModelVersion:
    """A version with the typed numbers, not stored."""
    numbers = {name: typed.text(name) for name in ("context_length", "max_concurrency")}
    valid = {name: int(text) for name, text in numbers.items() if text.isdecimal() and 0 < int(text[:9]) <= 10**7}
    names = ("engine", "artifact_uri", "artifact_digest")
    return ModelVersion(model_id="model", version="1", **{name: typed.text(name) for name in names}, **valid)


def _proposals(version: ModelVersion) -> list[tuple[Proposal, int]]:
    found = stored_checkpoints({(version.artifact_uri, version.artifact_digest)}).get(version.artifact_uri)
    if not version.artifact_uri or found is None:
        return []
    spares: Counter[str] = Counter()
    for (_, kind), count in spare_nodes().items():
        spares[kind] += count
    fitting = [each for each in propose(version.spec(), found, instance_shapes()) if not each.problem]
    ranked = sorted(fitting, key=lambda each: spares[each.instance_type] < each.degrees.nodes)
    return [(each, spares[each.instance_type]) for each in ranked[:PROPOSED]]


def _proposed_facts(typed: Typed) -> Proposed:
    rows = _proposals(_typed_version(typed))
    if rows:
        return Proposed(tuple(rows))
    return Proposed(
        problem="No proposals: the dimensions of the artifact are not known before it is imported or validated."
    )


def _proposed(proposal: Proposal, row: int) -> dict[str, str]:
    degrees = {"type": proposal.instance_type, "nodes": proposal.degrees.nodes, "tp": proposal.degrees.tp}
    texts = {f"parallelism-{row}-{name}": str(value) for name, value in degrees.items()}
    texts |= {"quantization.method": proposal.quantization} if proposal.quantization else {}
    return texts | ({"engine": proposal.engine} if row == 0 else {})


def _pick(typed: Typed, instance_type: str) -> dict[str, str]:
    """Adds the proposal for this type to the split, or replaces its row."""
    rows = _proposals(_typed_version(typed))
    proposal = next((each for each, _ in rows if each.instance_type == instance_type), None)
    if proposal is None:
        return {}
    numbers = [int(name.split("-")[1]) for name in typed.fields if name.startswith("parallelism-") and typed.text(name)]
    same = [name for name in typed.fields if name.endswith("-type") and typed.text(name) == instance_type]
    row = int(same[0].split("-")[1]) if same else max(numbers, default=-1) + 1
    return _proposed(proposal, row)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What validation would report before it reads the artifact."""

    objection: str
    problems: Mapping[str, str]


def _verdict(typed: Typed) -> Verdict | None:
    """None while the form has errors."""
    rows = typed.rows("parallelism")
    split = {
        row["type"].strip(): {name: int(row[name]) for name in SPLIT if row.get(name, "").strip().isdecimal()}
        for row in rows
        if row.get("type")
    }
    prompts = [
        {"prompt": row.get("prompt", ""), "expect": row.get("expect", "")} for row in typed.rows("golden_prompts")
    ]
    version = _typed_version(typed)
    if version.engine not in ENGINES:
        return None
    version.parallelism, version.golden_prompts = split, prompts
    version.golden_waiver = typed.text("golden_waiver")
    checkpoints = stored_checkpoints({(version.artifact_uri, version.artifact_digest)})
    found = evaluate_version(version.spec(), instance_shapes(), checkpoints)
    shown = {name: text.removeprefix("model@1: ") for name, text in found.problems.items() if text}
    return Verdict("" if shown else found.objection, shown)


# --- the form --------------------------------------------------------------------------------------------------------


def _engines(typed: Typed) -> list[Option]:
    return [Option(name) for name in ENGINES]


def _models(typed: Typed) -> list[Option]:
    return [Option(name) for name in Model.objects.values_list("name", flat=True)[:500]]


def _builds(typed: Typed) -> list[Option]:
    rows = EngineBuild.objects.order_by("name").values_list("name", "serves")
    return [Option("", "installed on nodes"), *(Option(name, name, serves) for name, serves in rows[:200])]


def _types(typed: Typed) -> list[Option]:
    return [Option(name) for name in sorted(instance_shapes(), key=lambda name: (name != LOCAL_CPU, name))]


def _methods(typed: Typed) -> list[Option]:
    return [Option("", "none"), *(Option(method.value) for method in Method)]


def _number(name: str, label: str) -> Input:
    return Input(name=name, label=label, kind=InputKind.NUMBER)


def _at(name: str, **more: Any) -> Input:
    return Input(name=name, at=f"ModelVersion.{name}", **more)


def _dtypes(typed: Typed) -> list[Option]:
    return [Option("", "none"), *(Option(name) for name in NEURON_DTYPES)]


def _schemes(typed: Typed) -> list[Option]:
    return [Option("", "default"), *(Option(name) for name in NEURON_SCHEMES)]


IDENTITY = Step(
    "Version",
    (
        Input(name="model", at="Model.metadata.name", options=_models, required=True, help="Its name in requests."),
        Input(
            name="version",
            at="ModelVersion.metadata.name",
            required=True,
            placeholder="1",
            help="Letters, digits, ., _ and -.",
        ),
        _at("based_on", kind=InputKind.HIDDEN),
        _at("artifact_uri", label="Weights"),
        _at("artifact_digest", label="Digest of the weights"),
    ),
)
SPLIT_STEP = Step(
    "Parallelism and memory",
    (
        _at(
            "parallelism",
            label="Split of a cell",
            options=_types,
            columns=(
                Input(name="type", label="Instance type", required=True, suggests=True),
                *(_number(name, name) for name in SPLIT),
            ),
            help="One row for each instance type on which it may run. Empty degrees are the type's defaults.",
        ),
    ),
    about="Nodes of a cell, and degrees over the whole cell: tensor (tp), context (cp), data (dp) and pipeline "
    "parallelism (pp). within: network nodes that its machines must share.",
    facts=Facts("models_registry/versions/proposed.html", _proposed_facts),
)
LIMITS = Step(
    "Limits",
    (
        _at("context_length"),
        _at("max_concurrency"),
        _at("ready_timeout_s", label="Start limit, seconds"),
        *(
            Input(
                name=f"modalities.{name}",
                at="ModelVersion.modalities",
                label=f"Takes {label}",
                kind=InputKind.CHECK,
                help=f"Otherwise requests with {label} get a 400.",
            )
            for name, label in ((Modality.IMAGE, "images"), (Modality.AUDIO, "sounds"), (Modality.VIDEO, "videos"))
        ),
    ),
)
ENGINE = Step(
    "Engine and build",
    (
        _at("engine", options=_engines, value="vllm", required=True),
        _at("engine_build", kind=InputKind.CHOICE, options=_builds),
    ),
)
SPEED = Step(
    "Speed",
    (
        Input(name="speculation.method", at="ModelVersion.speculation", label="Speculation", kind=InputKind.CHOICE,
              options=_methods, help="Guesses tokens that one step verifies together."),
        _number("speculation.tokens", "Guessed tokens per step"),
        Input(name="speculation.draft_uri", label="Draft weights"),
        Input(name="speculation.draft_digest", label="Digest of the draft weights"),
        _number("speculation.lookup_min", "Shortest n-gram"),
        _number("speculation.lookup_max", "Longest n-gram"),
        Input(name="quantization.method", at="ModelVersion.quantization", label="Quantization method",
              placeholder="fp8", help="Of vLLM or SGLang. Not needed if the checkpoint states it."),
        Input(name="quantization.dtype", label="Neuron type", kind=InputKind.CHOICE, options=_dtypes),
        Input(name="quantization.scheme", label="Neuron scheme", kind=InputKind.CHOICE, options=_schemes),
        Input(name="quantization.checkpoints_path", label="Neuron folder of quantized weights"),
        Input(name="speculation.more", label="Other speculation settings", kind=InputKind.JSON,
              help="An object, such as the tree of Medusa."),
        Input(name="quantization.more", label="Other quantization settings", kind=InputKind.JSON, help="An object."),
    ),
    folded=True,
)  # fmt: skip
ARGUMENTS = Step(
    "Extra arguments",
    (
        _at("engine_options", columns=(
            Input(name="option", label="Option", required=True),
            Input(name="value", label="Value", placeholder="true, 8, text or JSON", kind=InputKind.LONG),
        )),
        _at("engine_env", label="Environment", columns=(
            Input(name="variable", label="Variable", required=True),
            Input(name="value", label="Value", kind=InputKind.LONG),
        )),
        _at("adapters", columns=(
            Input(name="name", label="Name", required=True),
            Input(name="artifact_uri", label="Weights"),
            Input(name="artifact_digest", label="Digest"),
            _number("rank", "Rank"),
        )),
        _at("roles", placeholder='{"prefill": {"parallelism": {"inf2.48xlarge": {"tp": 24}}}}'),
        _at("by_type", placeholder='{"local.cpu": {"engine": "sim"}}', label="Differences by instance type"),
        _at("attention_heads"),
        _at("kv_heads"),
        _at("layers"),
    ),
    folded=True,
)  # fmt: skip
CHECKS = Step(
    "Checks",
    (
        _at("golden_prompts", columns=(
            Input(name="prompt", label="Prompt", kind=InputKind.LONG),
            Input(name="expect", label="Answer contains", kind=InputKind.LONG),
        ), help="Validation needs one, or the reason below. Cells answer them before they get requests."),
        _at("golden_waiver", label="Reason for none"),
        _at("validate", value="on", label="Validate"),
    ),
    facts=Facts("models_registry/versions/verdict.html", _verdict),
)  # fmt: skip


def _version_url(documents: Documents) -> str:
    return reverse("version", args=(documents[-1]["metadata"]["name"],))


VERSION_WIZARD = Wizard(
    title="New version",
    section="models",
    about="How a model is served: weights, engine, split over devices and limits. A draft can be changed until it is "
    "validated.",
    steps=(IDENTITY, ENGINE, SPLIT_STEP, LIMITS, SPEED, CHECKS, ARGUMENTS),
    documents=_version_documents,
    kinds=frozenset({Kind.MODEL, Kind.MODEL_VERSION}),
    creates=frozenset({Kind.MODEL_VERSION}),
    url=_version_url,
    start=_start_new,
    pick=_pick,
)
_FIXED = tuple(
    replace(each, kind=InputKind.HIDDEN) if each.name in {"model", "version"} else each
    for each in IDENTITY.inputs
    if each.name != "based_on"
)
DRAFT_WIZARD = replace(
    VERSION_WIZARD,
    title="Change draft",
    steps=(replace(IDENTITY, title="Weights", inputs=_FIXED), *VERSION_WIZARD.steps[1:]),
    creates=frozenset(),
    start=_start_edit,
)
