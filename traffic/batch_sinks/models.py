"""Sinks of batches, and the deliveries of batches to them."""

from django.db import models
from django.db.models import Q

from fleet.reconcile.planning.states import choices
from kernel.tones import Tone
from traffic.batch_sinks.planner import DELIVERY_TONE, DeliveryState, SinkKind, SinkValue
from traffic.batches.models import Batch

SETTABLE = (
    "kind", "url", "key_template", "value", "ttl_s", "errors", "part_mib", "username", "ca_pem",
)  # fmt: skip
"""Columns that admins set, besides the tenant and the password."""


class BatchSink(models.Model):
    """A destination of results of one tenant's batches. `sealed_password` is encrypted for this address and user."""

    name = models.SlugField(max_length=64, primary_key=True)
    tenant = models.CharField(max_length=64, help_text="Only its batches may use the sink.")
    kind = models.CharField(max_length=8, choices=choices(SinkKind))
    url = models.CharField(
        max_length=1000, help_text="`s3://bucket/prefix/{date}/{batch}`, or `valkeys://host:6379/0` (TLS), `valkey://`."
    )
    key_template = models.CharField(
        max_length=256, blank=True, help_text="Key of a line in Valkey, such as `answers:{custom_id}`. Also `{batch}`."
    )
    value = models.CharField(
        max_length=8, choices=choices(SinkValue), default=SinkValue.BODY.value, help_text="Body of the answer, or line."
    )
    ttl_s = models.PositiveIntegerField(default=86_400, help_text="Valkey removes a key after these seconds. 0: never.")
    errors = models.BooleanField(default=False, help_text="Also deliver failed lines.")
    part_mib = models.PositiveIntegerField(default=256, help_text="Size of an object in S3, 8 to 4096 MiB.")
    username = models.CharField(max_length=256, blank=True, help_text="Of Valkey. Empty: the default user.")
    sealed_password = models.TextField(blank=True)
    ca_pem = models.TextField(blank=True, help_text="Certificates that may sign the server's. Default: the host's.")
    actor = models.CharField(max_length=64)
    created_at = models.DateTimeField()
    changed_at = models.DateTimeField()

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name


class BatchDelivery(models.Model):
    """The results of a batch on their way to a sink, or those of a group of near-real-time requests (`batch` is null).

    - `fence` numbers its leases, each until `due_at`. `attempts` counts those in a row without progress.
    - Lines before byte `position` are delivered, of the error file if `in_errors`, else of the output file. `part` is
      the next object in S3.
    - `grouped_at`, `output_name` and `error_name`: when the group was formed, and its files in the store.
    - `lines` counts delivered lines; `dead` those that no attempt can deliver. `dead_letters` are the first of them."""

    batch = models.ForeignKey(Batch, on_delete=models.CASCADE, related_name="deliveries", null=True)
    sink = models.ForeignKey(BatchSink, on_delete=models.CASCADE, related_name="deliveries")
    state = models.CharField(max_length=16, choices=choices(DeliveryState), default=DeliveryState.PENDING.value)
    reason = models.TextField(blank=True)
    in_errors = models.BooleanField(default=False)
    grouped_at = models.DateTimeField(null=True)
    output_name = models.CharField(max_length=120, blank=True)
    error_name = models.CharField(max_length=120, blank=True)
    position = models.PositiveBigIntegerField(default=0)
    part = models.PositiveIntegerField(default=0)
    lines = models.PositiveBigIntegerField(default=0)
    dead = models.PositiveIntegerField(default=0)
    dead_letters = models.JSONField(default=list)
    attempts = models.PositiveIntegerField(default=0)
    fence = models.PositiveIntegerField(default=0)
    due_at = models.DateTimeField()
    ended_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ["-id"]
        indexes = [
            models.Index(fields=["due_at"], name="batch_delivery_due", condition=Q(state=DeliveryState.PENDING.value)),
        ]
        constraints = [models.UniqueConstraint(fields=["batch", "sink"], name="delivery_once")]

    def __str__(self) -> str:
        return f"{self.what} to {self.sink_id}"

    @property
    def what(self) -> str:
        return self.batch_id or f"requests {self.pk}"

    @property
    def place(self) -> str:
        """The name that takes the place of a batch in addresses of S3."""
        return self.batch_id or f"async_{self.pk}"

    @property
    def tone(self) -> Tone:
        return DELIVERY_TONE[DeliveryState(self.state)]
