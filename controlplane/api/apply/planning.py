"""Decides which steps bring the fleet to the state in the documents, each with its reason. Fields and objects that
documents omit stay unchanged: it never deletes by omission. Services decide whether a step is possible. Pure."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from enum import StrEnum
from typing import Any

from fleet.autoscaling.planning.policy import InvalidScaling, parse_scaling_policy, scaling_policy_as_json
from fleet.capacity.planning.pools import InvalidMarkets, parse_markets
from fleet.deployments.planner import InvalidPolicy, UpdatePolicy, parse_policy, policy_as_json
from fleet.machines.planner import InvalidWarmSpares, parse_warm_spares
from kernel.outbound import shown_url
from models_registry.imports.planner import CannotImport, parse_source
from traffic.region_shares.planning.policy import InvalidTrafficPolicy, TrafficPolicy, parse_traffic_policy
from traffic.region_shares.planning.policy import traffic_policy_as_json as traffic_as_json


class Kind(StrEnum):
    """Kinds of documents, in order of dependency."""

    INSTANCE_TYPE = "InstanceType"
    REGION = "Region"
    QUOTA = "Quota"
    MODEL = "Model"
    MODEL_IMPORT = "ModelImport"
    MODEL_VERSION = "ModelVersion"
    DEPLOYMENT = "Deployment"
    TRAFFIC_POLICY = "TrafficPolicy"
    BATCH_SINK = "BatchSink"
    BATCH_SCHEDULE = "BatchSchedule"
    FAULT_RULE = "FaultRule"
    GROUP = "Group"
    USER = "User"
    IDENTITY_PROVIDER = "IdentityProvider"
    WEBHOOK = "Webhook"


ORDER = {kind: place for place, kind in enumerate(Kind)}


class Action(StrEnum):
    CREATE = "create"
    CHANGE = "change"
    SCALE = "scale"
    ROLL_OUT = "roll_out"
    VALIDATE = "validate"


@dataclass(frozen=True, slots=True)
class Document:
    """The desired state. `index`: its position in the request; `spec`: its stated fields, with checked types.
    `secrets`: stated fields that no plan shows. They are set each time, because they cannot be compared."""

    index: int
    kind: Kind
    name: str
    spec: Mapping[str, Any]
    secrets: Mapping[str, str] = dataclass_field(default_factory=dict, repr=False)

    @property
    def title(self) -> str:
        return f"{self.kind} {self.name}"


@dataclass(frozen=True, slots=True)
class Change:
    """A changed value. `field`: dotted path below `spec`; None: missing."""

    field: str
    before: Any
    after: Any


@dataclass(frozen=True, slots=True)
class Step:
    """A change for one document. `arguments`: input of the step's service, by field of the document."""

    document: Document
    action: Action
    reason: str
    changes: tuple[Change, ...]
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Objection:
    """A document that no step can satisfy. `field`: dotted path below the document."""

    document: Document
    field: str
    rule: str
    message: str


@dataclass(frozen=True, slots=True)
class Plan:
    steps: tuple[Step, ...]
    unchanged: tuple[Document, ...]
    objections: tuple[Objection, ...]

    @property
    def deployments(self) -> tuple[str, ...]:
        """Names of the deployments that it changes, in order."""
        return tuple(dict.fromkeys(step.document.name for step in self.steps if step.document.kind is Kind.DEPLOYMENT))


Present = Mapping[tuple[Kind, str], Mapping[str, Any] | None]
"""Current state in the form of specs; None if the object does not exist. Keys with `_` are additions: `_state` of a
version and whether it is `_validating`, `_target` of a deployment with an active rollout."""

REQUIRED: Mapping[Kind, tuple[str, ...]] = {
    Kind.INSTANCE_TYPE: ("accelerator",),
    Kind.QUOTA: ("machines",),
    Kind.MODEL_IMPORT: ("source",),
    Kind.DEPLOYMENT: ("model_version", "instance_types", "regions"),
    Kind.BATCH_SINK: ("tenant", "kind", "url"),
    Kind.BATCH_SCHEDULE: ("key",),
    Kind.GROUP: ("role",),
    Kind.WEBHOOK: ("url",),
}
"""Required fields of a new object."""
FIXED: Mapping[Kind, Mapping[str, str]] = {
    Kind.REGION: dict.fromkeys(("provider", "stack", "aws_region"), "its machines belong to it: create another region"),
    Kind.MODEL_IMPORT: dict.fromkeys(("source", "pattern", "engine"), "import it under another version"),
}
"""Fields that cannot change after creation, with what to do instead."""


HIDDEN = "(hidden)"
SHOWN: Mapping[tuple[Kind, str], Callable[[str], str]] = {(Kind.WEBHOOK, "url"): shown_url}
"""How plans show fields with secret parts."""


def revision_of(present: Present) -> str:
    """A short text that changes with any change of these documents' objects."""
    stated = sorted((kind, name, state) for (kind, name), state in present.items())
    text = json.dumps(stated, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def object_revisions(present: Present) -> dict[str, str]:
    """Kind and name of each object -> its `revision_of`."""
    return {f"{kind} {name}": revision_of({(kind, name): state}) for (kind, name), state in present.items()}


def plan_documents(documents: Sequence[Document], present: Present) -> Plan:
    """The missing steps, in order of dependency."""
    steps: list[Step] = []
    unchanged: list[Document] = []
    objections: list[Objection] = list(_duplicates(documents))
    for document in sorted(documents, key=lambda one: (ORDER[one.kind], one.index)):
        try:
            planned = tuple(_steps(document, present[document.kind, document.name]))
        except _Objected as objected:
            objections.append(objected.objection)
            continue
        steps.extend(planned)
        if not planned:
            unchanged.append(document)
    return Plan(tuple(_scales_first(steps)), tuple(unchanged), tuple(objections))


class _Objected(Exception):
    def __init__(self, document: Document, field: str, rule: str, message: str) -> None:
        super().__init__(message)
        self.objection = Objection(document, field, rule, message)


def _scales_first(steps: Iterable[Step]) -> list[Step]:
    """Of a deployment's steps the rollout is last, because it uses the cells that the other steps want."""
    return sorted(steps, key=lambda step: step.action is Action.ROLL_OUT)


def _duplicates(documents: Sequence[Document]) -> Iterator[Objection]:
    first: dict[tuple[Kind, str], Document] = {}
    for document in documents:
        before = first.setdefault((document.kind, document.name), document)
        if before is not document:
            message = f"{document.title} is a duplicate: documents {before.index} and {document.index}"
            yield Objection(document, "metadata.name", "unique", message)


def _steps(document: Document, current: Mapping[str, Any] | None) -> Iterator[Step]:
    if current is None:
        yield _create(document)
        yield from _validation(document, current)
        return
    spec = _complete(document, current)
    changes = (*_changes(spec, current, document.spec), *_secret_changes(document, HIDDEN))
    _refuse_fixed(document, current, changes)
    if document.kind is Kind.DEPLOYMENT:
        yield from _deployment_steps(document, current, changes)
    elif changes:
        yield _change(document, changes)
    yield from _validation(document, current)


def _create(document: Document) -> Step:
    for field in REQUIRED.get(document.kind, ()):
        if field not in document.spec:
            message = f"is required, because {document.title} does not exist yet"
            raise _Objected(document, f"spec.{field}", "required", message)
    stated = {field: value for field, value in document.spec.items() if field != "validate"}
    changes = tuple(_shown(document, Change(field, None, value)) for field, value in sorted(stated.items()))
    arguments = {**stated, **document.secrets}
    changes = (*changes, *_secret_changes(document, None))
    return Step(document, Action.CREATE, f"{document.title} does not exist", changes, arguments)


def _secret_changes(document: Document, before: str | None) -> tuple[Change, ...]:
    return tuple(Change(field, before, HIDDEN) for field in sorted(document.secrets))


def _shown(document: Document, change: Change) -> Change:
    show = SHOWN.get((document.kind, change.field))
    if show is None:
        return change
    before = None if change.before is None else show(change.before)
    return Change(change.field, before, show(change.after))


def _validation(document: Document, current: Mapping[str, Any] | None) -> Iterator[Step]:
    """The start of a draft's validation, if its document wants one and none is running."""
    is_due = current is None or (current.get("_state") == "draft" and not current.get("_validating"))
    if document.kind is Kind.MODEL_VERSION and document.spec.get("validate") and is_due:
        reason = f"{document.name} is a draft; its artifacts are read and compared with their digests"
        yield Step(document, Action.VALIDATE, reason, (), {})


def _complete(document: Document, current: Mapping[str, Any]) -> Mapping[str, Any]:
    """The spec merged into the current state, because policies may be partial."""
    spec = document.spec
    try:
        if document.kind is Kind.TRAFFIC_POLICY:
            whole = parse_traffic_policy(spec, None, parse_traffic_policy(current, None, TrafficPolicy()))
            return {key: value for key, value in traffic_as_json(whole).items() if key in spec}
        if document.kind is Kind.DEPLOYMENT:
            return {**spec, **dict(_whole_policies(spec, current))}
    except InvalidTrafficPolicy as wrong:
        raise _Objected(document, f"spec.{wrong.field}", "policy", str(wrong)) from None
    except InvalidPolicy as wrong:
        raise _Objected(document, f"spec.update_policy.{wrong.field}", "policy", str(wrong)) from None
    except InvalidScaling as wrong:
        raise _Objected(document, f"spec.scaling.{wrong.field}", "policy", str(wrong)) from None
    return spec


def _whole_policies(spec: Mapping[str, Any], current: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    if "update_policy" in spec:
        before = parse_policy(current["update_policy"], UpdatePolicy())
        yield "update_policy", policy_as_json(parse_policy(spec["update_policy"], before))
    if "scaling" in spec:
        whole = parse_scaling_policy(spec["scaling"], parse_scaling_policy(current["scaling"]))
        yield "scaling", scaling_policy_as_json(whole)


def _changes(spec: Mapping[str, Any], current: Mapping[str, Any], stated: Mapping[str, Any]) -> Iterator[Change]:
    """Differences in stated values; objects are compared recursively, except those that are replaced as a whole."""
    for field in stated:
        if field == "regions":
            yield from _region_changes(spec["regions"], current["regions"])
        elif field == "update_policy":
            yield from _field_changes("update_policy", spec[field], policy_as_json(parse_policy(current[field])))
        elif field == "scaling":
            yield from _field_changes(
                "scaling", spec[field], scaling_policy_as_json(parse_scaling_policy(current[field]))
            )
        elif field == "slo":
            yield from _field_changes("slo", spec[field], current[field])
        elif field == "by_type" and "regions" in current:
            before = current["by_type"]
            differing = {region: wanted for region, wanted in spec[field].items() if wanted != before.get(region, {})}
            yield from (Change(f"by_type.{region}", before.get(region), differing[region]) for region in differing)
        elif field in current and not _says_the_same(field, spec[field], current[field]):
            yield Change(field, current[field], spec[field])


_PARSED: Mapping[str, Callable[[Any], Any]] = {
    "spares": parse_warm_spares,
    "markets": parse_markets,
    "source": parse_source,
}


def _says_the_same(field: str, one: Any, other: Any) -> bool:
    """Spares may be a number or an object, markets have no order, and the branch of a source has a default."""
    if field not in _PARSED:
        return bool(one == other)
    parse = _PARSED[field]
    try:
        return bool(parse(one) == parse(other))
    except (InvalidWarmSpares, InvalidMarkets, CannotImport):
        return False  # its service reports errors


def _field_changes(path: str, after: Mapping[str, Any], before: Mapping[str, Any]) -> Iterator[Change]:
    for key, value in after.items():
        if isinstance(value, Mapping):
            yield from _field_changes(f"{path}.{key}", value, before.get(key) or {})
        elif value != before.get(key):
            yield Change(f"{path}.{key}", before.get(key), value)


def _region_changes(wanted: Sequence[Mapping[str, Any]], current: Mapping[str, Any]) -> Iterator[Change]:
    for place in wanted:
        if current.get(place["region"]) != place["cells"]:
            yield Change(f"regions.{place['region']}.cells", current.get(place["region"]), place["cells"])


def _refuse_fixed(document: Document, current: Mapping[str, Any], changes: Sequence[Change]) -> None:
    fixed = FIXED.get(document.kind, {})
    for change in changes:
        if change.field in fixed:
            message = f"is {change.before!r} and cannot become {change.after!r}; {fixed[change.field]}"
            raise _Objected(document, f"spec.{change.field}", "fixed", message)
    if document.kind is Kind.MODEL_VERSION and changes and current["_state"] != "draft":
        model = document.name.partition("@")[0]
        message = (
            f"{document.name} is {current['_state']}, and only drafts may change; create a new version of "
            f"{model}, for example with based_on: {document.name}"
        )
        raise _Objected(document, f"spec.{changes[0].field}", "immutable", message)


def _change(document: Document, changes: tuple[Change, ...]) -> Step:
    fields = ", ".join(change.field for change in changes)
    stated = {**document.spec, **document.secrets}
    arguments = {change.field: stated[change.field] for change in changes}
    shown = tuple(_shown(document, change) for change in changes)
    return Step(document, Action.CHANGE, f"{document.title} differs in {fields}", shown, arguments)


def _deployment_steps(document: Document, current: Mapping[str, Any], changes: Sequence[Change]) -> Iterator[Step]:
    scales = tuple(change for change in changes if change.field.startswith("regions."))
    mixes = tuple(change for change in changes if change.field.startswith("by_type."))
    plain = tuple(change for change in changes if change not in (*scales, *mixes) and change.field != "model_version")
    yield from _plain_change(document, plain)
    if scales:
        cells = {change.field.split(".", 1)[1].removesuffix(".cells"): change.after for change in scales}
        before = current["regions"]
        differences = (
            f"{cells_text(cells[name])} in {name}, not {_cells_there(before.get(name, 0))}" for name in cells
        )
        yield Step(
            document, Action.SCALE, f"{document.name} should have {', '.join(differences)}", scales, {"regions": cells}
        )
    yield from _plain_change(document, mixes)  # the region may have had no cells before
    yield from _rollout(document, current)


def _plain_change(document: Document, changes: tuple[Change, ...]) -> Iterator[Step]:
    if changes:
        fields = tuple(dict.fromkeys(change.field.partition(".")[0] for change in changes))
        named = ", ".join(change.field for change in changes)
        arguments = {field: document.spec[field] for field in fields}
        yield Step(document, Action.CHANGE, f"{document.title} differs in {named}", changes, arguments)


def cells_text(count: int | Mapping[str, int]) -> str:
    """`1 cell`, `3 cells`, `2 to 8 cells`, `1 prefill and 3 decode cells`."""
    if isinstance(count, Mapping) and "prefill" in count:
        parts = [f"{number} {role}" for role, number in count.items() if number]
        return f"{' and '.join(parts)} cells"
    if isinstance(count, Mapping):
        return f"{count['min']} to {count['max']} cells"
    return "1 cell" if count == 1 else f"{count} cells"


def _cells_there(count: int | Mapping[str, int]) -> str:
    return cells_text(count) if isinstance(count, Mapping) else str(count)


def _rollout(document: Document, current: Mapping[str, Any]) -> Iterator[Step]:
    """A rollout, unless an active one has the same target."""
    wanted, target = document.spec.get("model_version"), current["_target"]
    if wanted is None or wanted == target:
        return
    now = current["model_version"]
    away = f", with an active rollout to {target}" if target != now else ""
    arguments = {"version": wanted, "allow_unreleased": document.spec.get("allow_unreleased", False)}
    change = Change("model_version", target, wanted)
    yield Step(
        document, Action.ROLL_OUT, f"{document.name} should serve {wanted}, runs {now}{away}", (change,), arguments
    )
