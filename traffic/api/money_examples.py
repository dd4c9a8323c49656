"""What the documentation shows of usage, cost, prices and budgets."""

from typing import Any

USED: dict[str, Any] = {
    "arrived": 1210,
    "limited": 3,
    "failed": 0,
    "refused": 0,
    "requests": 1204,
    "errors": 1,
    "cancelled": 12,
    "estimated": 0,
    "prompt_tokens": 812_400,
    "cached_tokens": 402_176,
    "completion_tokens": 201_331,
    "charged": "1.302416",
    "machine_cost": "4.118250",
}

USAGE: dict[str, Any] = {
    "start": "2026-11-14T12:00:00Z",
    "end": "2026-11-21T12:00:00Z",
    "by": "day",
    "group": ["tenant"],
    "rows": [
        {
            "start": "2026-11-21T00:00:00Z",
            "tenant": "rufus",
            "key": None,
            "deployment": None,
            "class": None,
            "adapter": None,
            **USED,
        }
    ],
    "totals": USED,
    "truncated": False,
}

COST_FIGURES: dict[str, Any] = {
    "prompt_tokens": 812_400,
    "cached_tokens": 402_176,
    "completion_tokens": 201_331,
    "machine_hours": "2.000000",
    "cost_usd": "30.118250",
    "idle_cost_usd": "12.881750",
    "energy_j": "9012331.250000",
    "idle_energy_j": "1203112.000000",
    "carbon_g": "1091.233001",
    "idle_carbon_g": "145.678112",
    "usd_per_mtoken": 29.710303,
    "joules_per_mtoken": 8890264.518,
    "gco2e_per_mtoken": 1076.451,
    "usd_per_mtoken_with_idle": 42.417664,
    "joules_per_mtoken_with_idle": 10077081.0,
    "gco2e_per_mtoken_with_idle": 1220.158,
    "cost_source": "rated",
    "energy_source": "measured",
    "carbon_source": "rated",
}
COSTS: dict[str, Any] = {
    "start": "2026-11-14T12:00:00Z",
    "end": "2026-11-21T12:00:00Z",
    "by": "total",
    "group": ["version", "type"],
    "rows": [
        {
            "start": None,
            "deployment": None,
            "version": "sim-70b@1",
            "type": "trn1.32xlarge",
            "region": None,
            "tenant": None,
            "class": None,
            "adapter": None,
            **COST_FIGURES,
        }
    ],
    "totals": {
        **COST_FIGURES,
        "cells_usd": "43.000000",
        "spares_usd": "21.500000",
        "spares_energy_j": "602110.000000",
        "bill_usd": "64.500000",
        "open_machine_hours": 0.4,
        "refused_readings": 0,
        "measured_percent": 100.0,
    },
    "truncated": False,
    "batches": {
        "tokens": 120_500,
        "cost_usd": "2.310000",
        "usd_per_mtoken": 19.170124,
        "marginal_usd_per_mtoken": 1.25,
        "marginal_usd_error": 0.21,
        "marginal_joules_per_mtoken": 901233.5,
        "hours": 168,
    },
    "weights": [
        {
            "version": "sim-70b@1",
            "type": "trn1.32xlarge",
            "cached": 0.02,
            "completion": 12.4,
            "known": "measured",
            "samples": 4_032,
            "nodes": 3,
            "error_percent": 2.1,
            "weight_error_percent": 1.4,
            "bounded": False,
            "fitted_at": "2026-11-21T11:00:00Z",
        }
    ],
}

BUDGET: dict[str, Any] = {
    "id": 2,
    "tenant": "rufus",
    "deployment": "",
    "unit": "usd",
    "limit": "1200.000000",
    "alert_at": [50, 80, 100],
    "hard_stop": True,
    "month": "2026-11",
    "used": "842.120000",
    "used_percent": 70.2,
    "level": 50,
    "stopped": False,
    "stopped_at": None,
    "actor": "ada",
    "changed_at": "2026-11-01T08:00:00Z",
}

NEW_BUDGET: dict[str, Any] = {"tenant": "rufus", "unit": "usd", "limit": "1200.00", "hard_stop": True}
