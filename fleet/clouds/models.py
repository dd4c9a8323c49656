"""The tables of clouds: the install's name, regions, pools of capacity, launches, notices, image moves and call
budgets. Holds no secret."""

import msgspec
from django.db import models
from django.db.models import Q

from fleet.capacity.planning.pools import LaunchOutcome, Market, PoolView
from fleet.clouds.planning.upkeep import CloudBase, ImageState
from fleet.machines.models import Machine
from fleet.reconcile.planning.states import CloudRegionState, MachineRole, NoticeKind, NoticeSource, choices
from fleet.regions.models import Region
from models_registry.instance_types.models import InstanceType

IMAGE_LENGTH = 330
"""Of an image: the ID of an AMI, or a reference in a registry of containers."""


class Install(models.Model):
    """This control plane as clouds know it; one row. Every machine, volume and interface that it launches is tagged
    with `id`.

    `dry_run_until`: until then garbage collection only logs what it would delete. `read_only`: why nothing may be
    launched or terminated, as in a copied database; "" if all may be. `beat_etag`, `beat_nonce`: of the ownership
    object in the install's bucket as written last; the nonce is stored here before the object is written."""

    only = models.BooleanField(default=True, unique=True, editable=False)
    id = models.CharField(max_length=16, primary_key=True)
    created_at = models.DateTimeField()
    dry_run_until = models.DateTimeField()
    read_only = models.TextField(blank=True)
    beat_etag = models.CharField(max_length=128, blank=True)
    beat_nonce = models.CharField(max_length=64, blank=True)
    beat_at = models.DateTimeField(null=True)

    def __str__(self) -> str:
        return self.id


class CloudRegion(models.Model):
    """A region of a cloud with the outputs of its stack (`base`: `fleet.clouds.planning.upkeep`) and its last list.

    `aws_region`: AWS's name. `types_read`: the instance types of the last reading. `machines_cap` and `price_cap` (US
    dollars an hour; null: none) limit launches within an hour. `listed_at`: start of the last complete list;
    `silent_zones` did not answer it. `alarmed`: EC2 instance -> the alarm for which it may be replaced. `suspects`:
    garbage of the last complete lists, as source to ID to time (`fleet.clouds.services.garbage`)."""

    region = models.OneToOneField(Region, on_delete=models.CASCADE, primary_key=True, related_name="cloud")
    aws_region = models.CharField(max_length=32)
    stack = models.CharField(max_length=128)
    state = models.CharField(max_length=16, choices=choices(CloudRegionState), default=CloudRegionState.READING.value)
    reason = models.TextField(blank=True)
    read_at = models.DateTimeField(null=True)
    types_read = models.JSONField(default=list, blank=True)
    base = models.JSONField(default=dict, blank=True)
    machines_cap = models.PositiveIntegerField(default=64)
    price_cap = models.FloatField(null=True)
    listed_at = models.DateTimeField(null=True)
    silent_zones = models.JSONField(default=list, blank=True)
    suspects = models.JSONField(default=dict, blank=True)
    alarmed = models.JSONField(default=dict, blank=True)

    def __str__(self) -> str:
        return f"{self.region_id} from {self.stack}"

    @property
    def suspect_count(self) -> int:
        return sum(len(found) for found in self.suspects.values())

    def stated_base(self) -> CloudBase:
        """Returns the outputs of its stack. Raises msgspec.ValidationError if the stack was not read yet."""
        return msgspec.convert(self.base, CloudBase)


class CapacityPool(models.Model):
    """One way to get machines of one type (`fleet.capacity.planning.pools.PoolView`). `zone`: its name in this account;
    `zone_id`: the same in all accounts. `network_nodes`: of its reservation, widest first. `next_image`: set while
    machines move to it (`ImageMove`).

    `declared_by`: the user who added it; "": found in the region's stack. Reading a stack adds pools and changes none.
    `price_per_hour`: US dollars for a machine at `price_at`; null: not known."""

    region = models.ForeignKey(Region, on_delete=models.CASCADE, related_name="pools")
    instance_type = models.ForeignKey(InstanceType, on_delete=models.PROTECT, related_name="pools")
    position = models.PositiveIntegerField()
    market = models.CharField(max_length=16, choices=choices(Market))
    zone = models.CharField(max_length=32)
    zone_id = models.CharField(max_length=32, blank=True)
    subnet = models.CharField(max_length=32)
    image = models.CharField(max_length=32)
    next_image = models.CharField(max_length=32, blank=True)
    network_nodes = models.JSONField(default=list, blank=True)
    reservation = models.CharField(max_length=32, blank=True)
    placement_group = models.CharField(max_length=255, blank=True)
    max_price = models.FloatField(null=True)
    price_per_hour = models.FloatField(null=True)
    price_at = models.DateTimeField(null=True)
    ends_at = models.DateTimeField(null=True)
    free = models.PositiveIntegerField(null=True)
    enabled = models.BooleanField(default=True)
    declared_by = models.CharField(max_length=64, blank=True)
    paused_until = models.DateTimeField(null=True)
    pause_reason = models.TextField(blank=True)
    failures = models.PositiveIntegerField(default=0)

    class Meta:
        ordering = ["region_id", "instance_type_id", "position"]
        constraints = [
            models.UniqueConstraint(fields=["region", "instance_type", "position"], name="pool_position_once"),
        ]

    def __str__(self) -> str:
        return f"{self.instance_type_id} {self.market} in {self.zone}"

    def view(self) -> PoolView:
        return PoolView(
            id=self.pk,
            region=self.region_id,
            instance_type=self.instance_type_id,
            position=self.position,
            market=Market(self.market),
            zone=self.zone,
            subnet=self.subnet,
            image=self.image,
            path=(self.zone_id or self.zone, *self.network_nodes),
            reservation=self.reservation,
            placement_group=self.placement_group,
            max_price=self.max_price,
            price_per_hour=self.price_per_hour,
            ends_at=self.ends_at,
            free=self.free,
            enabled=self.enabled,
            paused_until=self.paused_until,
            pause_reason=self.pause_reason,
            failures=self.failures,
        )


class LaunchUnit(models.Model):
    """Machines that are launched together or not at all. Open until its attempts can yield no more machines.

    `id`: of its orders (`ProviderCall.unit`), or of a single node or ingress. `markets`: allowed ways to buy; empty:
    any. `reason`: the last step, and why no other pool was used."""

    id = models.CharField(max_length=64, primary_key=True)
    region = models.ForeignKey(Region, on_delete=models.PROTECT, related_name="launch_units")
    instance_type = models.ForeignKey(InstanceType, on_delete=models.PROTECT, related_name="+")
    role = models.CharField(max_length=16, choices=choices(MachineRole))
    near = models.JSONField(default=list, blank=True)
    markets = models.JSONField(default=list, blank=True)
    reason = models.TextField(blank=True)
    created_at = models.DateTimeField()
    ended_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ["-created_at", "id"]
        indexes = [models.Index(fields=["region"], condition=Q(ended_at=None), name="launch_unit_open")]

    def __str__(self) -> str:
        return self.id


class LaunchAttempt(models.Model):
    """One try of a unit in one pool, written before its call (`fleet.clouds.planning.launches.AttemptView`).

    `subjects`: the nodes or ingresses of its machines, by index in the launch; a repeated call launches as many, even
    if some were given back. `base`: all other parameters of the call; a repeated call must send the same.
    `price_per_hour`: of one machine in US dollars; null: not known."""

    unit = models.ForeignKey(LaunchUnit, on_delete=models.CASCADE, related_name="attempts")
    number = models.PositiveIntegerField()
    pool = models.ForeignKey(CapacityPool, on_delete=models.SET_NULL, null=True, related_name="attempts")
    pool_seen = models.JSONField()
    base = models.JSONField()
    token = models.CharField(max_length=64, unique=True)
    subjects = models.JSONField()
    price_per_hour = models.FloatField(null=True)
    begun_at = models.DateTimeField()
    called_at = models.DateTimeField()
    again_at = models.DateTimeField(null=True)
    ended_at = models.DateTimeField(null=True)
    outcome = models.CharField(max_length=16, choices=choices(LaunchOutcome), blank=True)
    text = models.TextField(blank=True)

    class Meta:
        ordering = ["unit_id", "number"]
        constraints = [
            models.UniqueConstraint(fields=["unit", "number"], name="attempt_number_once"),
            models.UniqueConstraint(fields=["unit"], condition=Q(ended_at=None), name="attempt_one_open"),
        ]

    def __str__(self) -> str:
        return f"attempt {self.number} of {self.unit_id}"


class CloudNotice(models.Model):
    """An announcement about a machine: one open row of each kind, from any number of sources.

    `source`: the first. `ends_at`: when the machine ends; null: not stated. `evidence`: the latest statement of each
    source (`fleet.machines.planner`). `settled_at`: no work is left."""

    machine = models.ForeignKey(Machine, on_delete=models.CASCADE, related_name="notices")
    kind = models.CharField(max_length=32, choices=choices(NoticeKind))
    source = models.CharField(max_length=16, choices=choices(NoticeSource))
    at = models.DateTimeField()
    ends_at = models.DateTimeField(null=True)
    text = models.TextField(blank=True)
    evidence = models.JSONField(default=dict, blank=True)
    settled_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ["-at", "-id"]
        indexes = [models.Index(fields=["machine"], condition=Q(settled_at=None), name="notice_open")]
        constraints = [
            models.UniqueConstraint(fields=["machine", "kind"], condition=Q(settled_at=None), name="notice_once"),
        ]

    def __str__(self) -> str:
        return f"{self.kind} of {self.machine_id}"


class ImageMove(models.Model):
    """Moves the machines of an instance type in a region to `image`, or back (`fleet.clouds.planning.upkeep`). Its
    pools, or its `TaskImage`, have both, as `image` and `next_image`. `booted`: nodes that became ready on it;
    `failed`: units that did not boot. One move is under way for a type in a region. `image` is "" until the stack's
    current image has been read, if the request named none."""

    region = models.ForeignKey(Region, on_delete=models.CASCADE, related_name="image_moves")
    instance_type = models.ForeignKey(InstanceType, on_delete=models.PROTECT, related_name="+")
    image = models.CharField(max_length=IMAGE_LENGTH, blank=True)
    state = models.CharField(max_length=16, choices=choices(ImageState), default=ImageState.ASKED.value)
    reason = models.TextField(blank=True)
    booted = models.JSONField(default=list, blank=True)
    failed = models.JSONField(default=list, blank=True)
    asked_by = models.CharField(max_length=150)
    asked_at = models.DateTimeField()
    ended_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ["-asked_at", "-id"]
        constraints = [
            models.UniqueConstraint(
                fields=["region", "instance_type"], condition=Q(ended_at=None), name="image_move_one_open"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.instance_type_id} in {self.region_id} to {self.image or 'the image that its stack states'}"


class TaskImage(models.Model):
    """The image of the tasks of nodes of an instance type, in a region that is an ECS cluster: the one that its stack
    stated at the first launch, until a move changes it. `next_image`: set while tasks move to it (`ImageMove`)."""

    region = models.ForeignKey(Region, on_delete=models.CASCADE, related_name="task_images")
    instance_type = models.ForeignKey(InstanceType, on_delete=models.PROTECT, related_name="+")
    image = models.CharField(max_length=IMAGE_LENGTH)
    next_image = models.CharField(max_length=IMAGE_LENGTH, blank=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["region", "instance_type"], name="task_image_once")]

    def __str__(self) -> str:
        return f"{self.image} for {self.instance_type_id} in {self.region_id}"


class CallBucket(models.Model):
    """The remaining budget of one kind of call in an AWS region, shared by all processes
    (`fleet.clouds.planning.call_budget`). `region`: AWS's name."""

    region = models.CharField(max_length=32)
    call = models.CharField(max_length=64)
    tokens = models.FloatField()
    refilled_at = models.DateTimeField()
    halved_until = models.DateTimeField(null=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["region", "call"], name="call_bucket_once")]

    def __str__(self) -> str:
        return f"{self.call} in {self.region}"
