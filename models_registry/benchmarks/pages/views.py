"""The list of benchmarks, the page of one, their comparison, and the form that starts one. Services decide."""

from django.db.models import Q, QuerySet
from django.http import HttpResponse
from django.shortcuts import redirect
from django.urls import reverse

from controlplane.dashboard.actions import (
    Action,
    ActionMenu,
    ActionPage,
    Confirmation,
    Field,
    Submission,
    Target,
    action_menu,
    action_page_view,
    action_view,
    page_target,
)
from controlplane.dashboard.choices import choose_labelled
from controlplane.dashboard.fragments import Context, Filter, Fragment, Page, PageRequest, found_or_404
from controlplane.dashboard.lists import Column, List
from fleet.deployments.models import Deployment
from kernel.refusals import InvalidInput
from models_registry.benchmarks.api import StartBenchmarkSerializer
from models_registry.benchmarks.models import Benchmark
from models_registry.benchmarks.pages.data import (
    MOST_COMPARED,
    BenchmarksView,
    ComparisonView,
    PointsView,
    all_benchmarks,
    benchmark_points,
    benchmarks_compared,
    use_of,
)
from models_registry.benchmarks.planning.workload import BENCHMARK_OPEN, BenchmarkState
from models_registry.benchmarks.selectors import (
    BenchmarkTarget,
    NoTarget,
    benchmark_target,
    benchmarks_described,
)
from models_registry.benchmarks.services.benchmark import (
    BOUNDS,
    BenchmarkRequest,
    benchmark_cancel,
    benchmark_rules,
    benchmark_start,
    readable_use,
)
from models_registry.versions.models import ModelVersion
from models_registry.versions.planning.lifecycle import choices
from models_registry.versions.selectors import version_stated


def _listed(request: PageRequest) -> "QuerySet[Benchmark]":
    rows, state, text = Benchmark.objects.select_related("version"), request.text("state"), request.text("q")
    if text:
        rows = rows.filter(Q(version__model__name__icontains=text) | Q(deployment__icontains=text))
    return rows.filter(state=state) if state else rows


OF_GOODPUT = "Highest rate of all cells together that held the objective"
VERSION_ORDER = ("version__model__name", "version__version")
BENCHMARK_LIST: List[Benchmark] = List(
    name="benchmarks",
    columns=(
        Column("version", "Version", lambda row: row.version.reference, VERSION_ORDER),
        Column("state", "State", lambda row: row.state, ("state",)),
        Column("deployment", "Deployment", lambda row: row.deployment, ("deployment",), "wide"),
        Column("region", "Region", lambda row: row.region, ("region",), "wide"),
        Column("use", "Workload and objective", use_of, ("workload", "slo"), "wide"),
        Column("goodput", "Requests/s", lambda row: row.goodput, ("goodput",), "number", OF_GOODPUT, True),
        Column("chips", "Chips", lambda row: row.chips, ("chips",), "number wide", is_newest_first=True),
        Column("by", "By", lambda row: row.actor, ("actor",), "wide"),
        Column("created", "Created", lambda row: row.created_at, ("created_at",), "number wide", is_newest_first=True),
    ),
    query=_listed,
    order=("-id",),
    filters=("q", "state"),
)


def _filter(request: PageRequest) -> Filter:
    state = choose_labelled(request, "state", (("", "every state"), *choices(BenchmarkState)))
    return Filter(text_label="Model or deployment", text_name="q", text=request.text("q"), choices=(state,))


def _all_of_use(request: PageRequest) -> BenchmarksView:
    return all_benchmarks(request.text("use"))


BENCHMARKS = Page(
    section="benchmarks",
    title="Benchmarks",
    fragments=(
        Fragment("benchmarks-table", "", ("benchmarks",), "models_registry/benchmarks/table.html", BENCHMARK_LIST.page),
        Fragment(
            "benchmarks-use", "By use", ("benchmarks",), "models_registry/benchmarks/benchmarks.html", _all_of_use
        ),
    ),
    narrow=_filter,
    lists=(BENCHMARK_LIST,),
    charts=True,
)


def _benchmark_id(text: str) -> int:
    """The ID in a URL; 0, which no benchmark has, if it is not a number."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else 0


def _described(request: PageRequest) -> Benchmark:
    row = benchmarks_described().filter(pk=_benchmark_id(request.key)).first()
    return found_or_404(row, f"benchmark {request.key!r}")


def _points_of(request: PageRequest) -> PointsView:
    return benchmark_points(request.once(_described))


def _actions(request: PageRequest) -> ActionMenu:
    return action_menu(request.once(_described), request.caller.access, CANCEL)


BENCHMARK = Page(
    section="benchmarks",
    title="",
    fragments=(
        Fragment("benchmark", "", ("benchmarks:{key}",), "models_registry/benchmarks/benchmark.html", _described),
        Fragment(
            "benchmark-points", "Points", ("benchmarks:{key}",), "models_registry/benchmarks/points.html", _points_of
        ),
    ),
    actions=_actions,
    charts=True,
)


def _compared(request: PageRequest) -> ComparisonView:
    return benchmarks_compared([_benchmark_id(text) for text in request.filters.getlist("id")[:MOST_COMPARED]])


BENCHMARK_COMPARISON = Page(
    section="benchmarks",
    title="Compare benchmarks",
    fragments=(
        Fragment("benchmarks-compared", "", ("benchmarks",), "models_registry/benchmarks/compared.html", _compared),
    ),
)


def _cancel(form: Submission, row: Benchmark) -> None:
    benchmark_cancel(benchmark_id=row.pk, actor=form.actor, now=form.now)


TARGET = Target(
    noun="benchmark",
    find=lambda key: found_or_404(
        Benchmark.objects.select_related("version").filter(pk=_benchmark_id(key)).first(), f"benchmark {key!r}"
    ),
    name=lambda row: f"benchmark {row.pk}",
    url=lambda row: reverse("benchmark", args=(row.pk,)),
    deployment=lambda row: row.deployment,
    action_url=lambda row, name: reverse("benchmark-action", args=(row.pk, name)),
)
CANCEL = Action(
    target=TARGET,
    name="cancel",
    label="Cancel",
    run=_cancel,
    effect=lambda row, now: "No further rates are measured. Measured points are kept.",
    why_not=lambda row: "" if BenchmarkState(row.state) in BENCHMARK_OPEN else "This benchmark has ended.",
)
benchmark_action = action_view(CANCEL)

FORM_FIELDS = ("deployment", "region", "version", "workload", "slo", "seed", "first_rate", "beside_traffic")
USUAL_WORKLOAD, USUAL_SLO = "1000+150", "ttft=1000,itl=60"


def _texts(form: Submission) -> dict[str, str]:
    usual = {"workload": USUAL_WORKLOAD, "slo": USUAL_SLO}
    names = (*FORM_FIELDS, *(f"rules.{name}" for name in BOUNDS))
    return {name: form.text(name, usual.get(name, "")) for name in names}


def _rules_of(texts: dict[str, str]) -> dict[str, float]:
    """The stated rules. Raises InvalidInput if one is not a number."""
    rules = {}
    for name in BOUNDS:
        if text := texts[f"rules.{name}"]:
            try:
                rules[name] = float(text)
            except ValueError:
                message = f"rules.{name} is {text[:40]!r}; it must be a number"
                raise InvalidInput(field=f"rules.{name}", rule="range", message=message) from None
    return rules


def _target_of(deployment: str, region: str) -> BenchmarkTarget:
    try:
        return benchmark_target(deployment, region)
    except NoTarget as wrong:
        raise InvalidInput(field="deployment", rule="serves", message=str(wrong)) from None


def _request_of(form: Submission) -> tuple[BenchmarkRequest, BenchmarkTarget]:
    """The request in the form, for the version that the cells serve unless it names another."""
    texts = _texts(form)
    named = {name: texts[name] for name in FORM_FIELDS} | {"version": texts["version"] or "running"}
    fields = form.valid(StartBenchmarkSerializer, **named, rules=_rules_of(texts))
    stated = fields.pop("version")
    target = _target_of(fields["deployment"], fields["region"])
    if texts["version"]:
        version = version_stated(stated, field="version")
    else:
        version = ModelVersion.objects.get(pk=target.version_id)
    benchmark_rules(fields["rules"])
    asked = BenchmarkRequest(version, **fields)
    readable_use(asked)
    return asked, target


def _start(form: Submission, thing: None) -> HttpResponse:
    asked, _ = _request_of(form)
    return redirect("benchmark", key=str(benchmark_start(asked, actor=form.actor, now=form.now).pk))


def _start_form(form: Submission, thing: None) -> Context:
    texts = _texts(form)
    return {
        "form": texts,
        "deployments": list(Deployment.objects.order_by("name").values_list("name", flat=True)),
        "rules": [(name, low, high, texts[f"rules.{name}"]) for name, (low, high) in BOUNDS.items()],
    }


def _predicted(form: Submission, thing: None) -> Context:
    """The measurement that the form describes, or {} while no deployment is chosen."""
    if not form.text("deployment"):
        return {}
    asked, target = _request_of(form)
    workload, slo = readable_use(asked)
    hidden = {**_texts(form), "workload": workload, "slo": slo, "version": asked.version.reference}
    confirmation = Confirmation(
        name="start",
        label="Start",
        url=reverse("benchmark-new"),
        effect="",
        submit=f"Benchmark {asked.version.reference}",
        fields=tuple(Field(name, kind="hidden", value=text) for name, text in hidden.items() if text),
    )
    return {"asked": asked, "target": target, "workload": workload, "slo": slo, "confirmation": confirmation}


START: Action[None] = Action(target=page_target("benchmarks", "benchmarks"), name="start", label="Start", run=_start)
benchmark_new = action_page_view(
    ActionPage(
        action=START,
        template="models_registry/benchmarks/new.html",
        context=_start_form,
        predict=_predicted,
        deployment=lambda form: form.text("deployment"),
    )
)
