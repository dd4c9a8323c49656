"""Budgets of tenants and of machines."""

from datetime import date

from django.db import models
from django.db.models import Q

from traffic.planning.budget import DEFAULT_ALERT_AT, BudgetRules, BudgetStanding, BudgetUnit


def default_alert_at() -> list[int]:
    return list(DEFAULT_ALERT_AT)


class Budget(models.Model):
    """A monthly (UTC) limit on the use of a tenant, or on the cost of the machines of a deployment. A row with neither
    tenant nor deployment is about all machines, spares included.

    US dollars of a tenant are those charged by prices of tokens; US dollars of machines are what these machines cost.
    `month`, `level` and `stopped` are what was last announced. The keys of a tenant that is `stopped` are refused.
    """

    tenant = models.CharField(max_length=64, blank=True)
    deployment = models.CharField(max_length=96, blank=True)
    unit = models.CharField(max_length=8, choices=[(unit.value, unit.value) for unit in BudgetUnit])
    limit = models.DecimalField(max_digits=22, decimal_places=6)
    alert_at = models.JSONField(default=default_alert_at)
    hard_stop = models.BooleanField(default=False)
    actor = models.CharField(max_length=64)
    changed_at = models.DateTimeField()
    month = models.DateField(default=date(2000, 1, 1))
    level = models.PositiveIntegerField(default=0)
    stopped = models.BooleanField(default=False)
    stopped_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ["tenant", "deployment", "unit"]
        indexes = [models.Index(fields=["tenant"], name="budget_stopped", condition=Q(stopped=True))]
        constraints = [
            models.UniqueConstraint(fields=["tenant", "deployment", "unit"], name="budget_once"),
            models.CheckConstraint(condition=Q(tenant="") | Q(deployment=""), name="budget_of_one"),
            models.CheckConstraint(
                condition=~Q(tenant="") | Q(unit=BudgetUnit.USD.value, hard_stop=False), name="budget_of_machines"
            ),
        ]

    def __str__(self) -> str:
        return f"budget of {self.subject}"

    @property
    def subject(self) -> str:
        """The subject of its incidents: one for each budget."""
        if self.tenant:
            return f"tenant {self.tenant} ({self.unit})"
        return f"machines of {self.deployment or 'the fleet'}"

    def rules(self) -> BudgetRules:
        return BudgetRules(BudgetUnit(self.unit), self.limit, tuple(self.alert_at), self.hard_stop)

    def standing(self) -> BudgetStanding:
        return BudgetStanding(self.month, self.level, self.stopped)
