"""One model version as its page shows it: what it says, what a cell of it is, what was proven, where it runs, and what
may be asked of it now."""

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from django.db.models import Q

from controlplane.dashboard.selectors.models import degrees_words
from fleet.models import Cell, Deployment, Rollout
from fleet.planning.states import CELL_TONE, CellState
from fleet.selectors.rollout import ACTIVE, rollouts_described
from models_registry.models import ModelVersion, Validation
from models_registry.planning.diff import (
    NOT_NAMED,
    Change,
    InstanceTypeDiff,
    Line,
    VersionDiff,
    diff_versions,
    said_by,
)
from models_registry.planning.lifecycle import ValidationState, VersionState
from models_registry.selectors.fleet_answers import machines_known, version_uses
from models_registry.selectors.model import latest_validation, version_by_reference, versions_described
from models_registry.selectors.rendering import renderings

SIBLINGS_OFFERED = 100

EFFECTS: dict[str, str] = {
    "validate": "Its artifacts are read and compared with their digests, which can take minutes. If all is well it is "
    "validated, and nothing of it can be changed any more.",
    "release": "It may be rolled out by everybody. Nothing moves by itself.",
    "retire": "It is never rolled out again. This cannot be taken back.",
    "delete": "The draft is gone, with what was found by validating it. This cannot be taken back.",
}
FINAL = ("retire", "delete")
"""What cannot be taken back asks for the version's name."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Something that may be asked of the version in its present state. `is_final`: it asks for the version's name."""

    action: str
    effect: str
    needs_why: bool

    @property
    def label(self) -> str:
        return self.action.capitalize()

    @property
    def is_final(self) -> bool:
        return self.action in FINAL


@dataclass(frozen=True, slots=True)
class CellOfVersion:
    """What a cell is on one instance type: `words` of its degrees, `arguments` as one line for each flag."""

    instance_type: str
    problem: str
    words: str
    arguments: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class VersionPage:
    version: ModelVersion
    said: tuple[tuple[str, Any], ...]
    validation: Validation | None
    uses: tuple[str, ...]
    siblings: tuple[str, ...]

    @property
    def asks(self) -> tuple[Ask, ...]:
        """What its state allows; what is in use is not asked to retire."""
        return tuple(Ask(each, EFFECTS[each], each in ("release", "retire")) for each in self._actions())

    def _actions(self) -> tuple[str, ...]:
        match VersionState(self.version.state):
            case VersionState.DRAFT:
                is_running = self.validation is not None and self.validation.state == ValidationState.RUNNING
                first: tuple[str, ...] = () if is_running else ("validate",)
            case VersionState.VALIDATED:
                first = ("release",)
            case _:
                first = ()
        last = {VersionState.DRAFT: "delete", VersionState.VALIDATED: "retire", VersionState.RELEASED: "retire"}
        final = last.get(VersionState(self.version.state))
        return first if self.uses or final is None else (*first, final)


@dataclass(frozen=True, slots=True)
class Place:
    """Cells of a deployment in a region that run the version: how many are in each state, with its tone."""

    deployment: str
    region: str
    cells: int
    states: tuple[tuple[str, str, int], ...]


@dataclass(frozen=True, slots=True)
class VersionRuns:
    """`deployments` want the version; `places` have live cells of it; `rollouts` go to it or away from it now."""

    version: ModelVersion
    deployments: tuple[Deployment, ...]
    rollouts: tuple[Rollout, ...]
    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class Lines:
    """Lines of a comparison, those that differ apart from those that are alike."""

    differing: tuple[Line, ...]
    alike: tuple[Line, ...]


@dataclass(frozen=True, slots=True)
class DiffPage:
    """`diff` None: nothing to compare with was named. `siblings` are the other versions of the model."""

    version: ModelVersion
    against: str
    diff: VersionDiff | None
    siblings: tuple[str, ...]

    @property
    def sides(self) -> tuple[str, str]:
        """Short names of what is compared: without the model, where it is the same."""
        sides = (self.against, self.version.reference)
        models = {side.partition("@")[0] for side in sides}
        return (sides[0].partition("@")[2], sides[1].partition("@")[2]) if len(models) == 1 else sides

    def said(self) -> Lines:
        """What the two say of engine, artifacts and prompts."""
        return _apart(self.diff.fields) if self.diff else _apart(())

    def kinds(self) -> tuple["KindLines", ...]:
        """Instance types, with the degrees of a cell there, and its engine arguments where both sides have some."""
        return tuple(_kind_lines(kind, self) for kind in self.diff.instance_types) if self.diff else ()


@dataclass(frozen=True, slots=True)
class KindLines:
    """`unlike` says of which version no cell can be made there, and why; `is_named` is false of one that does not even
    name the instance type."""

    instance_type: str
    unlike: tuple[tuple[str, str, bool], ...]
    lines: Lines


def _kind_lines(kind: InstanceTypeDiff, page: DiffPage) -> KindLines:
    problems = ((page.against, kind.problem_before), (page.version.reference, kind.problem_after))
    unlike = tuple((reference, problem, problem != NOT_NAMED) for reference, problem in problems if problem)
    lines = kind.degrees if unlike else (*kind.degrees, *kind.arguments)
    return KindLines(kind.instance_type, unlike, _apart(lines))


def _apart(lines: tuple[Line, ...]) -> Lines:
    differing = tuple(line for line in lines if line.change is not Change.SAME)
    return Lines(differing, tuple(line for line in lines if line.change is Change.SAME))


def version_find(reference: str) -> ModelVersion | None:
    """The version that `model@version` names, with its last validation, or None."""
    return version_by_reference(versions_described().select_related("model"), reference)


def version_page(version: ModelVersion) -> VersionPage:
    return VersionPage(
        version=version,
        said=tuple(sorted((name, value) for name, value in said_by(version.spec()).items() if _is_option(name))),
        validation=latest_validation(version),
        uses=tuple(version_uses(version.pk)),
        siblings=_siblings(version),
    )


def _is_option(name: str) -> bool:
    """Golden prompts have a part of the page for themselves."""
    return not name.startswith("golden_")


def version_cells(version: ModelVersion) -> tuple[CellOfVersion, ...]:
    """What a cell of it is, by instance type."""
    return tuple(
        CellOfVersion(
            instance_type=each.instance_type,
            problem=each.problem,
            words=degrees_words(asdict(each.degrees)) if each.degrees else "",
            arguments=argument_lines(each.arguments),
            notes=each.notes,
        )
        for each in renderings(version, machines_known())
    )


def argument_lines(arguments: tuple[str, ...]) -> tuple[str, ...]:
    """`("--a", "1", "--b")` -> `("--a 1", "--b")`."""
    lines: list[str] = []
    for argument in arguments:
        if argument.startswith("--") or not lines:
            lines.append(argument)
        else:
            lines[-1] += f" {argument}"
    return tuple(lines)


def version_runs(version: ModelVersion) -> VersionRuns:
    """Where it runs, and is going to, in three queries."""
    either = Q(from_version=version) | Q(to_version=version)
    live = Cell.objects.filter(model_version=version).exclude(state=CellState.STOPPED.value)
    counted: dict[tuple[str, str], Counter[str]] = {}
    for deployment, region, state in live.values_list("deployment_id", "region_id", "state"):
        counted.setdefault((deployment, region), Counter())[state] += 1
    return VersionRuns(
        version=version,
        deployments=tuple(Deployment.objects.filter(model_version=version)),
        rollouts=tuple(rollouts_described().filter(either, state__in=ACTIVE)),
        places=tuple(_place(*where, states) for where, states in sorted(counted.items())),
    )


def _place(deployment: str, region: str, states: Counter[str]) -> Place:
    shown = tuple((state, CELL_TONE[CellState(state)].value, many) for state, many in sorted(states.items()))
    return Place(deployment, region, states.total(), shown)


def version_diff(version: ModelVersion, against: str) -> DiffPage:
    """How it differs from the version that `against` names; from any, also of another model."""
    other = version_by_reference(ModelVersion.objects.all(), against) if against else None
    diff = diff_versions(other.spec(), version.spec(), machines_known()) if other else None
    return DiffPage(version, against, diff, _siblings(version))


def _siblings(version: ModelVersion) -> tuple[str, ...]:
    others = ModelVersion.objects.filter(model=version.model_id).exclude(pk=version.pk).order_by("-id")
    return tuple(each.reference for each in others.only("model_id", "version")[:SIBLINGS_OFFERED])
