"""What the documentation shows of machines, invitations, certificates and agents."""

from typing import Any

MACHINE: dict[str, Any] = {
    "id": "m-7c1d9e02",
    "provider": "machines",
    "provider_id": "m-7c1d9e02",
    "address": "10.20.0.7",
    "region": "eu-west-1",
    "role": "node",
    "instance_type": "p5.48xlarge",
    "state": "taken",
    "reason": "it is n-0a1b2c3d",
    "tone": "ok",
    "node": "n-0a1b2c3d",
    "connected": True,
    "agent_version": "0.1.0",
    "what": "8 x NVIDIA H100 80GB HBM3, 192 cores, 2015 GiB",
    "zone": "",
    "market": "",
    "reservation": "",
    "image": "",
    "price_per_hour": None,
    "cloud_state": "",
    "network_nodes": ["spine-2", "rack-7"],
    "notices": [],
    "state_since": "2026-11-21T11:58:40Z",
    "created_at": "2026-11-21T11:58:31Z",
}

INVITATION: dict[str, Any] = {
    "prefix": "5e6f7a8b",
    "region": "eu-west-1",
    "role": "node",
    "instance_type": None,
    "count": 3,
    "left": 3,
    "state": "open",
    "created_by": "ada",
    "created_at": "2026-11-21T12:00:00Z",
    "expires_at": "2026-11-21T13:00:00Z",
}

NEW_INVITATION: dict[str, Any] = {
    **INVITATION,
    "line": (
        "curl -fsSLk --pinnedpubkey 'sha256//7HIpactkIAq2Y49orFOOQKurWxmmSFZhBCoQYcRhJ3Y=' "
        "https://control.example.com:8443/join | sh -s -- sw_5e6f7a8b_0f1e2d3c4b5a69788796a5b4c3d2e1f00f1e2d3c4b5a6978"
    ),
    "notices": [],
}

INVITE: dict[str, Any] = {"region": "eu-west-1", "count": 3, "expires_in_s": 3600}

CERTIFICATE: dict[str, Any] = {
    "name": "api",
    "region": None,
    "names": ["api.example.com", "*.models.example.com"],
    "issuer": "CN=Example CA 3,O=Example",
    "key_kind": "P-256",
    "fingerprint": 32 * "5f",
    "not_before": "2026-11-20T00:00:00Z",
    "not_after": "2027-02-18T00:00:00Z",
    "actor": "operator",
    "created_at": "2026-11-21T12:00:00Z",
    "changed_at": "2026-11-21T12:00:00Z",
}

NEW_CERTIFICATE: dict[str, Any] = {
    "name": "api",
    "certificate": "-----BEGIN CERTIFICATE-----\n…\n-----END CERTIFICATE-----\n",
    "private_key": "(PEM of the private key)",
}

AGENT_RELEASE: dict[str, Any] = {
    "id": "3fa9c0de81b2745a",
    "version": "0.1.0",
    "protocol": 2,
    "is_current": True,
    "archives": {"cp311-x86_64": {"digest": "9e0c" * 16, "size_bytes": 16141322}},
    "agents": ["i-us-east-1", "n-0a1b2c3d"],
    "created_at": "2026-11-21T12:00:00Z",
}

AGENT_ROLLOUT: dict[str, Any] = {
    "id": 7,
    "from_release": "8e83b4e031e30dde",
    "to_release": "3fa9c0de81b2745a",
    "state": "rolled_back",
    "tone": "idle",
    "reason": "n-0a1b2c3d was not well with 3fa9c0de81b2745a within 60 s: it is not connected; all run as before",
    "why": "security fix",
    "ring": 0,
    "rings": 3,
    "soak_s": 15.0,
    "actor": "ada",
    "moves": [
        {
            "agent": "n-0a1b2c3d",
            "ring": 0,
            "release": "8e83b4e031e30dde",
            "moved_at": "2026-11-21T12:01:04Z",
            "settled_at": None,
            "trouble": "",
        }
    ],
    "created_at": "2026-11-21T12:00:00Z",
    "ring_since": "2026-11-21T12:00:00Z",
    "ended_at": "2026-11-21T12:01:10Z",
}
