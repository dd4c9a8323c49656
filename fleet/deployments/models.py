"""Tables of deployments: the model version that serves, the regions, and the number of cells in each."""

from django.core.validators import MaxValueValidator, MinValueValidator, RegexValidator
from django.db import models

from engine_agent.protocol.states import ServingClass
from fleet.autoscaling.planning.policy import CellPools, CellRange, Cells, RolesBy, ScalingPolicy, parse_scaling_policy
from fleet.autoscaling.planning.role_split import RoleSplit, split_within
from fleet.capacity.planning.pools import Market
from fleet.chains.planner import Chain, parse_chain
from fleet.deployments.planner import (
    PRIORITY_MOST,
    GrantRule,
    Objective,
    Preempts,
    SharingPolicy,
    UpdatePolicy,
    parse_objective,
    parse_policy,
)
from fleet.quotas.models import TEAM
from fleet.reconcile.planning.states import choices
from fleet.regions.models import Region
from models_registry.versions.models import ModelVersion


class Deployment(models.Model):
    """A model version to serve. `next_ordinal` numbers its cells; numbers are never reused."""

    SETTABLE = (
        "serving_class", "drain_deadline_s", "update_policy", "slo", "scaling", "markets", "team", "priority",
        "preemptible", "preempts", "instance_types", "chain",
    )  # fmt: skip
    """Columns that requests may set. The API, documents and the command line follow this list."""

    name = models.SlugField(max_length=96, primary_key=True)
    model_version = models.ForeignKey(ModelVersion, on_delete=models.PROTECT, related_name="deployments")
    instance_types = models.JSONField(
        help_text="Instance types of its cells, the preferred first. Each cell uses one of them."
    )
    serving_class = models.CharField(max_length=16, choices=choices(ServingClass), default=ServingClass.REALTIME.value)
    drain_deadline_s = models.FloatField(
        default=60.0,
        validators=[MinValueValidator(0), MaxValueValidator(24 * 3600.0)],
        help_text="How long a drained cell may finish its requests, in seconds.",
    )
    update_policy = models.JSONField(
        default=dict, blank=True, help_text="Differences from the defaults or, in a change, from the current policy."
    )
    slo = models.JSONField(
        default=dict,
        blank=True,
        help_text="Differences from its serving class: `availability`, `ttft_ms`, and `ttft_share`, the share of "
        "requests that must keep it.",
    )
    scaling = models.JSONField(
        default=dict,
        blank=True,
        help_text="Scaling where cells are a range. Differences from the defaults or, in a change, from the "
        "current policy: `mode` (`shadow` or `act`), `target_utilisation`, `slo_burn`, `itl_p95_ms`, `down_after_s`, "
        "`start_up_s`, `budget_per_hour`, `roles` (`stated` or `planned`), `itl_p99_ms`, and `schedule` as a whole.",
    )
    markets = models.JSONField(
        default=list,
        blank=True,
        help_text=f"Markets in which its machines may be bought, of: {', '.join(Market)}; empty: any.",
    )
    team = models.SlugField(
        max_length=64,
        blank=True,
        validators=[RegexValidator(TEAM)],
        help_text="Team whose quota its machines count against; empty: none.",
    )
    priority = models.PositiveSmallIntegerField(
        null=True,
        blank=True,
        validators=[MaxValueValidator(PRIORITY_MOST)],
        help_text="Higher priorities get scarce machines first; null: from its serving class.",
    )
    preemptible = models.BooleanField(
        null=True,
        blank=True,
        help_text="Whether others may take cells below its minimum; null: only if its class is batch.",
    )
    preempts = models.CharField(
        max_length=8,
        choices=choices(Preempts),
        default=Preempts.MIN.value,
        help_text="Cells for which it takes machines from lower priorities: `min`, the start of its range or the "
        "number that was set; `need`, all; `nothing`.",
    )
    chain = models.JSONField(
        default=dict,
        blank=True,
        help_text="The deployment that plans its requests and an objective for both: `planner`, `ttft_ms` from the "
        "planner's request to its own first token, `ttft_share` of requests that must keep it, and `planner_ms`, the "
        "planner's part. Empty: none.",
    )
    next_ordinal = models.PositiveIntegerField(default=1)
    created_at = models.DateTimeField()

    class Meta:
        ordering = ["name"]
        constraints = [
            models.CheckConstraint(
                condition=models.Q(instance_types__0__isnull=False), name="deployment_instance_types_some"
            ),
            models.CheckConstraint(
                condition=models.Q(priority__isnull=True) | models.Q(priority__lte=PRIORITY_MOST),
                name="deployment_priority_most",
            ),
        ]

    def __str__(self) -> str:
        return self.name

    def policy(self) -> UpdatePolicy:
        return parse_policy(self.update_policy)

    def objective(self) -> Objective:
        return parse_objective(self.slo, ServingClass(self.serving_class))

    def chain_stated(self) -> Chain | None:
        """The objective over it and its planner, or None."""
        return parse_chain(self.chain)

    def scaling_policy(self) -> ScalingPolicy:
        return parse_scaling_policy(self.scaling)

    @property
    def plans_roles(self) -> bool:
        """Whether the planner chooses the roles of its cells."""
        return bool(self.scaling.get("roles") == RolesBy.PLANNED.value)

    def sharing(self) -> SharingPolicy:
        """The sharing policy with the defaults of its serving class."""
        stated = SharingPolicy(self.priority, self.preemptible, Preempts(self.preempts))
        return stated.of_class(ServingClass(self.serving_class))


class DeploymentRegion(models.Model):
    """Target number of cells in a region, of which `prefill` and `decode` have these roles; the rest is mixed.
    `by_type`: cells per instance type; the planner places the rest. `cells_min` and `cells_max`: the range within which
    the autoscaler sets `cells`; None: only users do. `cells_granted`: cells allowed while machines are scarce
    (`fleet.quotas.planning`), with `granted_at`, `grant_rule` and `grant_reason`; None: all."""

    deployment = models.ForeignKey(Deployment, on_delete=models.CASCADE, related_name="regions")
    region = models.ForeignKey(Region, on_delete=models.PROTECT, related_name="deployments")
    cells = models.PositiveIntegerField()
    prefill = models.PositiveIntegerField(default=0)
    decode = models.PositiveIntegerField(default=0)
    by_type = models.JSONField(default=dict, blank=True)
    cells_min = models.PositiveIntegerField(null=True, blank=True)
    cells_max = models.PositiveIntegerField(null=True, blank=True)
    cells_granted = models.PositiveIntegerField(null=True, blank=True)
    granted_at = models.DateTimeField(null=True, blank=True)
    grant_rule = models.CharField(max_length=16, choices=choices(GrantRule), blank=True)
    grant_reason = models.TextField(blank=True)

    class Meta:
        ordering = ["deployment_id", "region_id"]
        constraints = [
            models.UniqueConstraint(fields=["deployment", "region"], name="deployment_once_per_region"),
            models.CheckConstraint(
                condition=models.Q(cells_min__isnull=True, cells_max__isnull=True)
                | models.Q(cells_min__gte=0, cells_max__gte=models.F("cells_min"), cells_max__gt=0),
                name="deployment_cells_range",
            ),
            models.CheckConstraint(
                condition=models.Q(prefill=0, decode=0) | models.Q(prefill__gt=0, decode__gt=0),
                name="deployment_roles_in_pairs",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.deployment_id} in {self.region_id}: {self.cells}"

    @property
    def range(self) -> CellRange | None:
        """The range within which the autoscaler sets the number of cells, or None."""
        if self.cells_min is None or self.cells_max is None:
            return None
        return CellRange(self.cells_min, self.cells_max)

    @property
    def pools(self) -> CellPools | None:
        """Cells per role, or None if all are mixed."""
        split = split_within(self.cells, self.prefill, self.decode)
        return CellPools(split.prefill, split.decode, split.mixed) if split.is_apart else None

    def stated(self, *, plans_roles: bool) -> Cells:
        """The target as a user stated it. Excludes planned roles."""
        return self.range or (None if plans_roles else self.pools) or self.cells

    @property
    def split(self) -> RoleSplit:
        """Roles of the cells allowed while machines are scarce."""
        return split_within(self.cells_in_force, self.prefill, self.decode)

    @property
    def cells_in_force(self) -> int:
        """Cells allowed while machines are scarce."""
        return self.cells if self.cells_granted is None else min(self.cells, self.cells_granted)
