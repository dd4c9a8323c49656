"""The rules by which faults are judged, and whether each is in force. Declared once; decides nothing."""

from enum import StrEnum


class Rule(StrEnum):
    """What may lead to a replacement. `operator`: requested by an operator, and no setting stops that; the others are
    automatic."""

    HARD_SIGNATURE = "hard_signature"
    SILENCE = "silence"
    SLOW = "slow"
    REPEATED_REPAIRS = "repeated_repairs"
    NOTICE = "notice"
    OPERATOR = "operator"


class RuleMode(StrEnum):
    """Shadow: record what the rule would have done, and touch nothing. A new rule begins so."""

    OFF = "off"
    SHADOW = "shadow"
    ON = "on"


SETTABLE_RULES = tuple(rule for rule in Rule if rule is not Rule.OPERATOR)


class IncidentKind(StrEnum):
    """Incidents that the planner of faults opens and closes."""

    HARDWARE = "hardware-fault"
    UNATTRIBUTED = "collectives-fault"
    SOFT = "hardware-warning"
    SLOW = "node-slow"
    REPEATED_REPAIRS = "repeated-repairs"
    COMMON_CAUSE = "common-cause"
    FROZEN = "repairs-frozen"
    ALL_SILENT = "all-agents-silent"
    WITNESSED = "silent-node"
    UNREACHABLE = "agent-unreachable"
    CLOUD_NOTICE = "cloud-notice"


NO_USABLE_CELL = "no-usable-cell"
"""Kind of the incident of a deployment that no cell of a region can serve (`traffic.planning.unserved`); its subject is
`DEPLOYMENT@REGION`."""
NEEDS_OPERATOR = frozenset({IncidentKind.REPEATED_REPAIRS})
"""While such an incident is open its node stays as it is, out of every cell: an operator must inspect the machine."""
