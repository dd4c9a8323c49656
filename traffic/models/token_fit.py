"""What engines took for tokens, and what follows for their weights."""

from typing import Any

from django.db import models

from traffic.planning.machine_cost import TokenWeights
from traffic.planning.token_fit import WorkSums


def _no_sums() -> dict[str, Any]:
    return {"products": list(WorkSums().products), "targets": list(WorkSums().targets)}


class TokenWork(models.Model):
    """Sums over what a node's cell computed on a day (UTC); see `WorkSums`. A node that leaves keeps its days."""

    version = models.CharField(max_length=160)
    instance_type = models.CharField(max_length=64)
    node = models.CharField(max_length=64)
    day = models.DateField()
    samples = models.PositiveIntegerField(default=0)
    sums = models.JSONField(default=_no_sums)
    square = models.FloatField(default=0)
    steps = models.PositiveBigIntegerField(default=0)
    completion_tokens = models.PositiveBigIntegerField(default=0)

    class Meta:
        ordering = ["-day", "version", "instance_type", "node"]
        constraints = [
            models.UniqueConstraint(fields=["version", "instance_type", "node", "day"], name="token_work_once"),
        ]

    def __str__(self) -> str:
        return f"work of {self.node} for {self.version} on {self.day}"

    def work(self) -> WorkSums:
        return WorkSums(
            self.samples, tuple(self.sums["products"]), tuple(self.sums["targets"]), self.square, self.steps,
            self.completion_tokens,
        )  # fmt: skip

    def take(self, work: WorkSums) -> None:
        self.samples, self.square = work.samples, work.square
        self.sums = {"products": list(work.products), "targets": list(work.targets)}
        self.steps, self.completion_tokens = work.steps, work.completion_tokens


class TokenFit(models.Model):
    """The weights of tokens of a version on an instance type, as measured; see `FittedWeights`. Microseconds of an
    engine's time; errors in shares."""

    version = models.CharField(max_length=160)
    instance_type = models.CharField(max_length=64)
    prompt = models.PositiveBigIntegerField()
    cached = models.PositiveBigIntegerField()
    completion = models.PositiveBigIntegerField()
    step_us = models.FloatField()
    sequence_us = models.FloatField()
    prompt_us = models.FloatField()
    cached_us = models.FloatField()
    sequences = models.FloatField()
    samples = models.PositiveBigIntegerField()
    nodes = models.PositiveIntegerField()
    error = models.FloatField()
    weight_error = models.FloatField()
    bounded = models.BooleanField(default=False)
    fitted_at = models.DateTimeField()

    class Meta:
        ordering = ["version", "instance_type"]
        constraints = [models.UniqueConstraint(fields=["version", "instance_type"], name="token_fit_once")]

    def __str__(self) -> str:
        return f"tokens of {self.version} on {self.instance_type}"

    def weights(self) -> TokenWeights:
        return TokenWeights(self.prompt, self.cached, self.completion)
