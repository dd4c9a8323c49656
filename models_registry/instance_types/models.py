"""The table of instance types: shipped ones (`shipped.csv`), and those that operators or agents added."""

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from django.core.exceptions import ValidationError
from django.core.validators import MaxValueValidator, MinValueValidator, RegexValidator
from django.db import models

from kernel.tones import Tone
from models_registry.instance_types.planner import CPU_ARCHITECTURES, NAME, VENDORS, InstanceShape

MOST = 1_000_000
"""Limit against typing errors."""


class Origin(models.TextChoices):
    """Where the values of a type come from."""

    SHIPPED = "shipped"
    OPERATOR = "operator"
    FOUND = "found"


ORIGIN_TONE = {Origin.SHIPPED: Tone.IDLE, Origin.OPERATOR: Tone.OK, Origin.FOUND: Tone.WARN}


def validate_finite(value: float) -> None:
    """NaN is neither below nor above a bound. Whole numbers are finite, also those that no float holds."""
    if not isinstance(value, int) and not math.isfinite(value):
        raise ValidationError("it must be a finite number", code="finite")


def _bounded(least: float = 0, most: float = MOST) -> list[Callable[[Any], None]]:
    return [validate_finite, MinValueValidator(least), MaxValueValidator(most)]


class InstanceType(models.Model):
    """A type of machine. Its fields are those of `InstanceShape`."""

    name = models.CharField(max_length=64, primary_key=True, validators=[RegexValidator(NAME)])
    accelerator = models.CharField(
        max_length=64, help_text="As the shipped types name it, such as `h100`; `cpu` or `none` without accelerators."
    )
    chips = models.PositiveIntegerField(
        default=0, validators=[MaxValueValidator(1024)], help_text="Number of accelerators."
    )
    cores = models.PositiveIntegerField(
        default=0,
        validators=[MaxValueValidator(MOST)],
        help_text="Units that run one rank each: GPUs, or logical NeuronCores. Default: one for each accelerator.",
    )
    memory_gib = models.FloatField(
        default=0, validators=_bounded(), help_text="Memory of all accelerators, or of the host without accelerators."
    )
    price_per_hour = models.FloatField(
        default=0, validators=_bounded(), help_text="US dollars on demand; 0: unknown. Rates take precedence."
    )
    watts = models.FloatField(
        default=0, validators=_bounded(), help_text="Maximum power of the whole machine; 0: unknown."
    )
    tensor_parallel_degree = models.PositiveIntegerField(
        default=1,
        validators=_bounded(1),
        help_text="Degree of versions that state none, for each machine. Default: one rank on every core.",
    )
    vendor = models.CharField(
        max_length=16, blank=True, default="", choices=[(name, name) for name in ("", *VENDORS)],
        help_text="Maker of the accelerators. Default: as of shipped types with the same accelerator.",
    )  # fmt: skip
    arch = models.CharField(
        max_length=16, blank=True, default="", help_text="Compute capability, or version of the NeuronCores."
    )
    lnc = models.PositiveIntegerField(
        default=1, validators=_bounded(1, 8), help_text="Physical NeuronCores in a logical one."
    )
    device_fraction = models.FloatField(
        default=1, validators=_bounded(0.01, 1), help_text="Part of an accelerator that the machine has, if below 1."
    )
    chip_watts = models.FloatField(
        default=0, validators=_bounded(), help_text="Maximum power of one accelerator; 0: unknown."
    )
    cpu_arch = models.CharField(
        max_length=16, blank=True, default="", choices=[(name, name) for name in ("", *CPU_ARCHITECTURES)],
        help_text="Architecture of the host's processor; empty: any.",
    )  # fmt: skip
    vcpus = models.PositiveIntegerField(null=True, blank=True, validators=[MaxValueValidator(MOST)])
    host_memory_gib = models.FloatField(null=True, blank=True, validators=_bounded(), help_text="Memory of the host.")
    network_cards = models.PositiveIntegerField(null=True, blank=True, validators=[MaxValueValidator(1024)])
    efa_interfaces = models.PositiveIntegerField(
        null=True, blank=True, validators=[MaxValueValidator(1024)], help_text="Network cards that support EFA."
    )
    network_gbps = models.FloatField(
        null=True, blank=True, validators=_bounded(), help_text="Bandwidth of all network cards, in gigabits a second."
    )
    local_nvme_gb = models.PositiveIntegerField(
        null=True, blank=True, validators=[MaxValueValidator(MOST)], help_text="Local NVMe storage in gigabytes."
    )
    interconnect = models.CharField(
        max_length=32, blank=True, default="", help_text="Link between accelerators, such as `nvswitch`."
    )
    interconnect_gb_s = models.FloatField(
        null=True, blank=True, validators=_bounded(),
        help_text="Its bandwidth for each accelerator, both directions, in gigabytes a second.",
    )  # fmt: skip
    notes = models.CharField(max_length=500, blank=True, default="")
    sources = models.CharField(max_length=500, blank=True, default="", help_text="Where the values were read.")
    origin = models.CharField(
        max_length=16, choices=Origin.choices, default=Origin.OPERATOR,
        help_text="`shipped` with the product, stated by an `operator`, or `found` by an agent on a machine.",
    )  # fmt: skip
    changed_by = models.CharField(max_length=64, blank=True, default="")
    changed_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name

    @property
    def tone(self) -> Tone:
        return ORIGIN_TONE[Origin(self.origin)]

    def shape(self) -> InstanceShape:
        return InstanceShape(**{name: getattr(self, name) for name in SHAPE_FIELDS})


SHAPE_FIELDS = tuple(field.name for field in fields(InstanceShape))
SETTABLE = tuple(name for name in SHAPE_FIELDS if name != "name")
"""Columns that operators state."""
