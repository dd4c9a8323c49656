"""Example bodies of the API's documentation."""

from typing import Any

INGRESS: dict[str, Any] = {
    "id": "i-us-east-1",
    "region": "us-east-1",
    "address": "127.0.0.1",
    "port": 8080,
    "connected": True,
    "last_seen_at": "2026-11-21T12:00:01Z",
    "revision": 12,
    "wanted_revision": 12,
    "haproxy_pid": 4711,
    "reason": "",
    "cells": {"sim-70b-us-east-1-1": "up", "sim-70b-us-east-1-2": "drain"},
    "created_at": "2026-11-21T11:57:00Z",
}

ROUTING_TABLE: dict[str, Any] = {
    "id": "us-east-1@12",
    "region": "us-east-1",
    "revision": 12,
    "current": True,
    "reason": "sim-70b-us-east-1-2 drains",
    "created_at": "2026-11-21T12:00:00Z",
}

ROUTING_TABLE_WITH_BODY: dict[str, Any] = {
    **ROUTING_TABLE,
    "body": {
        "type": "routing_table",
        "revision": 12,
        "region": "us-east-1",
        "pools": [
            {
                "name": "sim-70b",
                "models": ["sim-70b"],
                "serving_class": "realtime",
                "cells": [
                    {
                        "cell": "sim-70b-us-east-1-1",
                        "generation": 1,
                        "address": "127.0.0.1",
                        "port": 21000,
                        "agent_check_port": 21001,
                        "max_connections": 16,
                        "drain": False,
                    }
                ],
                "spill": [{"region": "us-west-2", "address": "127.0.0.1", "port": 8081}],
                "fractions": {"us-east-1": 1.0},
            }
        ],
        "max_body_bytes": 4194304,
        "retry_after_s": 5,
    },
}
