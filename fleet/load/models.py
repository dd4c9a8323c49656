"""Tables of load over time: limited series in three steps, and the state of counting."""

from django.db import models


class LoadSubject(models.Model):
    """Something with a load history: `fleet`, `region:<name>`, `deployment:<name>`, `deployment:<name>@<region>`,
    `cell:<id>` or `node:<id>`. `index`: its last fine window; `memory`: the base of the next one
    (`fleet.load.planner.Accumulator`), empty for nodes."""

    name = models.CharField(max_length=200, unique=True)
    index = models.BigIntegerField(default=0)
    memory = models.BinaryField(default=bytes)
    seen_at = models.DateTimeField()

    def __str__(self) -> str:
        return self.name


class LoadWindow(models.Model):
    """A window of `step_s` seconds from `at`. `covered_s`: seconds that its counts cover; gauges are means; `slow`:
    first tokens later than the objective; latencies are None without samples. `tokens_per_s` are generated ones.
    `running`, `waiting`, `kv_percent` (mean of the cells) and `step_ms` are None if no engine reported them."""

    pk = models.CompositePrimaryKey("subject_id", "step_s", "at")
    subject = models.ForeignKey(LoadSubject, on_delete=models.CASCADE, related_name="windows", db_index=False)
    step_s = models.PositiveSmallIntegerField()
    at = models.DateTimeField()
    covered_s = models.FloatField()
    requests = models.PositiveBigIntegerField()
    errors = models.PositiveBigIntegerField()
    slow = models.PositiveBigIntegerField()
    cells = models.FloatField()
    in_flight = models.FloatField()
    queued = models.FloatField()
    tokens_per_s = models.FloatField()
    ttft_p50_ms = models.FloatField(null=True)
    ttft_p95_ms = models.FloatField(null=True)
    itl_p50_ms = models.FloatField(null=True)
    itl_p95_ms = models.FloatField(null=True)
    prompt_tokens = models.PositiveBigIntegerField(default=0)
    preemptions = models.PositiveBigIntegerField(default=0)
    ttft_p99_ms = models.FloatField(null=True)
    running = models.FloatField(null=True)
    waiting = models.FloatField(null=True)
    kv_percent = models.FloatField(null=True)
    cache_hit_percent = models.FloatField(null=True)
    step_ms = models.FloatField(null=True)

    def __str__(self) -> str:
        return f"{self.step_s} s of subject {self.subject_id} from {self.at:%Y-%m-%d %H:%M:%S}"


class NodeWindow(models.Model):
    """A window of a node, `node:<id>`: use of its machine and its devices. A deployment and a region have the mean of
    their nodes, the hottest device and the total power. Totals of bytes and errors are the last ones in the window, so
    that differences between windows count everything in between; only nodes have them. Unreported columns are None."""

    pk = models.CompositePrimaryKey("subject_id", "step_s", "at")
    subject = models.ForeignKey(LoadSubject, on_delete=models.CASCADE, related_name="node_windows", db_index=False)
    step_s = models.PositiveSmallIntegerField()
    at = models.DateTimeField()
    cpu_percent = models.FloatField(null=True)
    memory_percent = models.FloatField(null=True)
    disk_percent = models.FloatField(null=True)
    utilisation_percent = models.FloatField(null=True)
    device_memory_percent = models.FloatField(null=True)
    clock_percent = models.FloatField(null=True)
    temperature_c = models.FloatField(null=True)
    power_watts = models.FloatField(null=True)
    network_received = models.BigIntegerField(null=True)
    network_sent = models.BigIntegerField(null=True)
    disk_read = models.BigIntegerField(null=True)
    disk_written = models.BigIntegerField(null=True)
    ecc_errors = models.BigIntegerField(null=True)
    link_errors = models.BigIntegerField(null=True)

    class Meta:
        indexes = [models.Index(fields=["step_s", "at"], name="node_window_step_at")]

    def __str__(self) -> str:
        return f"{self.step_s} s of node subject {self.subject_id} from {self.at:%Y-%m-%d %H:%M:%S}"


class RefusedRequests(models.Model):
    """Requests of a deployment that failed at an ingress and that no cell counts. Without a deployment: failed before
    their model was known. `codes`: the ingress's latest totals, of the counter identified by `since`; `total`: sum over
    all its counters; `at`: when that last grew; `sampled`: the part that is in windows. `cut` and `cut_sampled`:
    streams that ended early, whose request a cell has counted; not in `total`."""

    ingress = models.CharField(max_length=64)
    region = models.CharField(max_length=64)
    deployment = models.CharField(max_length=96, blank=True)
    since = models.CharField(max_length=40)
    codes = models.JSONField()
    total = models.PositiveBigIntegerField(default=0)
    sampled = models.PositiveBigIntegerField(default=0)
    cut = models.PositiveBigIntegerField(default=0)
    cut_sampled = models.PositiveBigIntegerField(default=0)
    at = models.DateTimeField()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["ingress", "deployment"], name="refused_at_ingress_once")]

    def __str__(self) -> str:
        return f"refused by {self.ingress} of {self.deployment}"
