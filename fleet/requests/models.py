"""The table of sampled requests."""

from datetime import datetime, timedelta

from django.db import models

from engine_agent.protocol.request_messages import REQUEST_ID_CHARS_MAX, SampleKind
from fleet.reconcile.planning.states import choices
from fleet.requests.planner import FAILED
from kernel.tones import Tone


class RequestSample(models.Model):
    """A request that a cell's proxy sampled (`engine_agent.protocol.request_messages.RequestSample`), and never its
    text. `cell`, `deployment` and `region` outlive their rows. Names come from the node that leads the cell; a tenant's
    page checks them against what ingresses counted. Rows without a cell are from ingresses, for requests that no cell
    answered; their tenant is that of the key, as the control plane knows it."""

    cell = models.CharField(
        max_length=160, blank=True, help_text="The cell whose proxy measured it; empty: no cell answered."
    )
    deployment = models.CharField(max_length=96, blank=True)
    region = models.CharField(max_length=64)
    generation = models.PositiveIntegerField(help_text="Start of the cell.")
    request = models.CharField(max_length=REQUEST_ID_CHARS_MAX, help_text="`X-Request-Id` of the answer.")
    at = models.DateTimeField(help_text="When it reached the cell, or the ingress.")
    kind = models.CharField(
        max_length=8,
        choices=choices(SampleKind),
        help_text="`uniform` sample, one of the `slow`est, `linked` by its trace, an `error`, or `refused` without a "
        "valid key.",
    )
    status = models.PositiveSmallIntegerField(help_text="HTTP status of the answer.")
    reason = models.CharField(max_length=64, blank=True, help_text="Code of the error; empty: none was stated.")
    tenant = models.CharField(max_length=64, blank=True)
    key = models.CharField(max_length=16, blank=True, help_text="Prefix of the application key.")
    serving_class = models.CharField(max_length=16, blank=True)
    adapter = models.CharField(max_length=64, blank=True)
    path = models.CharField(max_length=64, blank=True)
    ingress = models.CharField(max_length=64, blank=True)
    prefix = models.CharField(max_length=12, blank=True, help_text="Keyed hash of the first 512 bytes of its text.")
    is_stream = models.BooleanField(default=False)
    is_handed_over = models.BooleanField(default=False, help_text="A prefill cell read its prompt.")
    is_handed_back = models.BooleanField(default=False, help_text="The ingress tried another cell.")
    in_flight = models.PositiveIntegerField(default=0, help_text="Requests in the cell when it arrived.")
    prompt_tokens = models.PositiveIntegerField(default=0)
    cached_tokens = models.PositiveIntegerField(default=0, help_text="Prompt tokens found in the prefix cache.")
    completion_tokens = models.PositiveIntegerField(default=0)
    ingress_ms = models.FloatField(null=True, help_text="At the ingress and on the way, by two clocks.")
    queue_ms = models.FloatField(null=True, help_text="In the cell's proxy, until the engine got it.")
    first_ms = models.FloatField(null=True, help_text="From its arrival at the cell to its first token.")
    total_ms = models.FloatField(help_text="From its arrival at the cell to its end.")
    trace = models.CharField(
        max_length=32, blank=True, help_text="Id of its client's trace, if it is in the sample by traces."
    )

    class Meta:
        ordering = ["-id"]
        constraints = [models.UniqueConstraint(fields=["cell", "at", "request"], name="request_sample_once")]
        indexes = [
            models.Index(fields=["at"], name="request_sample_at"),
            models.Index(fields=["kind", "at"], name="request_of_kind"),
            models.Index(fields=["deployment", "at"], name="request_of_deployment"),
            models.Index(fields=["deployment", "at"], name="request_of_trace", condition=~models.Q(trace="")),
            models.Index(fields=["request"], name="request_by_id", opclasses=["text_pattern_ops"]),
            models.Index(fields=["key", "at"], name="request_errors_of_key", condition=models.Q(kind="error")),
            models.Index(
                fields=["tenant", "at"],
                name="request_errors_of_tenant",
                condition=models.Q(kind="error", cell=""),
            ),
        ]

    def __str__(self) -> str:
        return self.request

    @property
    def ended_at(self) -> datetime:
        return self.at + timedelta(milliseconds=min(self.total_ms, 1e9))

    @property
    def tone(self) -> Tone:
        if self.kind not in FAILED:
            return Tone.OK
        return Tone.WARN if 400 <= self.status < 500 or self.is_handed_back else Tone.BAD

    @property
    def outcome(self) -> str:
        """Returns a text such as "503 engine_died, tried elsewhere"."""
        return f"{self.answer} {self.why}".strip()

    @property
    def answer(self) -> str:
        return str(self.status)

    @property
    def why(self) -> str:
        return ", ".join(filter(None, (self.reason, "tried elsewhere" if self.is_handed_back else "")))
