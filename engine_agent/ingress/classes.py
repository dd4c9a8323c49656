"""Serving classes as an ingress knows them. Declared once for this folder; decides nothing."""

from enum import StrEnum


class ServingClass(StrEnum):
    """How urgent a request is, most urgent first."""

    REALTIME = "realtime"
    NEAR_REALTIME = "near_realtime"
    BATCH = "batch"
