"""The environment that the launcher gives its processes. Pure: builds mappings, reads none of its own."""

from collections.abc import Mapping
from pathlib import Path

from controlplane.embedded.configuration import Configuration
from controlplane.embedded.membership import Membership, in_url
from controlplane.embedded.state_directory import Secrets

HOME_MARK = "SWITCHYARD_LAUNCHED_FROM"
"""Carried by everything that a launcher starts, directly or not: by it a process is known to belong to a home."""

LOOPBACK_NAMES = "127.0.0.1,localhost,[::1]"
"""The names under which web answers unless the environment says otherwise (controlplane.settings)."""
SHARED = (
    "SWITCHYARD_URL", "SWITCHYARD_ALLOWED_HOSTS", "SWITCHYARD_TRUSTED_ORIGINS", "SWITCHYARD_TRUSTED_PROXIES",
    "SWITCHYARD_HTTPS", "SWITCHYARD_REQUIRE_SECOND_FACTOR", "SWITCHYARD_OIDC_ISSUER", "SWITCHYARD_OIDC_CLIENT_ID",
    "SWITCHYARD_OIDC_CLIENT_SECRET", "SWITCHYARD_OIDC_TITLE", "SWITCHYARD_OIDC_SCOPES", "SWITCHYARD_OIDC_GROUPS_CLAIM",
    "SWITCHYARD_OIDC_ADMIT_ALL", "SWITCHYARD_REGION_LATENCY_MS", "SWITCHYARD_WEBHOOK_NETWORKS",
    "SWITCHYARD_API_READS_PER_MIN", "SWITCHYARD_API_WRITES_PER_MIN", "SWITCHYARD_API_STRANGER_REQUESTS_PER_MIN",
    "SWITCHYARD_ARTIFACT_SOURCES", "SWITCHYARD_ARTIFACT_MAX_GIB", "SWITCHYARD_ARTIFACT_LIMIT_S",
    "SWITCHYARD_LOG_FORMAT", "SWITCHYARD_STANDBY_AWAY_S", "SWITCHYARD_DEMO_PROVIDER", "ENGINE",
)  # fmt: skip
"""What a host that joins takes over: hosts of one control plane must not answer differently."""

_NOT_PASSED_ON = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "DETACH", "WAIT_S")


def with_shared(inherited: Mapping[str, str], membership: Membership | None) -> dict[str, str]:
    """What `inherited` says, and where it says nothing, what the first host of several said; an empty variable says
    nothing."""
    shared = membership.shared if membership else {}
    return {**inherited, **{name: text for name, text in shared.items() if not inherited.get(name)}}


def control_plane_environment(
    inherited: Mapping[str, str],
    configuration: Configuration,
    secrets: Secrets,
    *,
    database_url: str,
    redis_url: str,
    membership: Membership | None = None,
) -> dict[str, str]:
    """What web, worker, beat and the management commands get; agents inherit it from them. Of several hosts all have
    what the first one had, unless `inherited` says otherwise, and name every host to agents."""
    stated = with_shared(inherited, membership)
    return {
        **{name: text for name, text in stated.items() if name not in _NOT_PASSED_ON},
        **(_of_all_hosts(membership, stated) if membership else {}),
        HOME_MARK: str(configuration.home),
        "DJANGO_SETTINGS_MODULE": "controlplane.settings",
        "DATABASE_URL": database_url,
        "REDIS_URL": redis_url,
        "SWITCHYARD_HOME": str(configuration.home),
        "SWITCHYARD_CACHE": str(configuration.cache),
        "SWITCHYARD_PORT": str(configuration.port),
        "SWITCHYARD_AGENT_PORT": str(configuration.agent_port),
        "SWITCHYARD_INGRESS_PORT": str(configuration.ingress_port),
        "SWITCHYARD_SECRET_KEY": secrets.secret_key,
        "PYTHONUNBUFFERED": "1",
        # setproctitle would otherwise overwrite the environment in which we look for the home's mark.
        "SPT_NOENV": "1",
    }


def _of_all_hosts(membership: Membership, stated: Mapping[str, str]) -> dict[str, str]:
    names = stated.get("SWITCHYARD_ALLOWED_HOSTS") or LOOPBACK_NAMES
    addresses = [in_url(host.address) for host in membership.hosts]
    return {
        "SWITCHYARD_AGENT_URL": membership.agent_urls,
        "SWITCHYARD_ALLOWED_HOSTS": ",".join(dict.fromkeys([*names.split(","), *addresses])),
    }


def server_environment(inherited: Mapping[str, str], home: Path) -> dict[str, str]:
    """What the embedded servers get: no secret, and no PG* variable that would bend them."""
    passed_on = {name: text for name, text in inherited.items() if name in {"PATH", "TZ", "LD_LIBRARY_PATH"}}
    return {**passed_on, HOME_MARK: str(home), "LC_ALL": "C"}
