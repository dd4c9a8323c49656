"""The table of plan drafts."""

from django.db import models


class PlanDraft(models.Model):
    """Documents that an operator gathers before applying them together. `key` is in its link, so it is random.
    `documents`: of `controlplane.api.apply`, each object once. `bases`: kind and name of an object -> its revision when
    its document was added. An applied draft stays as a record, without changes."""

    key = models.CharField(max_length=32, primary_key=True)
    owner = models.CharField(max_length=150)
    name = models.CharField(max_length=80)
    documents = models.JSONField(default=list)
    bases = models.JSONField(default=dict)
    changed_at = models.DateTimeField()
    applied_at = models.DateTimeField(null=True)
    applied_by = models.CharField(max_length=150, blank=True)

    class Meta:
        ordering = ["-changed_at", "key"]
        indexes = [models.Index(fields=["owner", "-changed_at"], name="plan_draft_owner")]

    def __str__(self) -> str:
        return f"draft {self.name!r} of {self.owner}"
