"""The environment that the launcher gives its processes."""

from collections.abc import Mapping
from pathlib import Path

from controlplane.embedded.configuration import Configuration
from controlplane.embedded.state_directory import Secrets

HOME_MARK = "SWITCHYARD_LAUNCHED_FROM"
"""Carried by everything that a launcher starts, directly or not: by it a process is known to belong to a home."""

_NOT_PASSED_ON = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "DETACH", "WAIT_S")


def control_plane_environment(
    inherited: Mapping[str, str],
    configuration: Configuration,
    secrets: Secrets,
    *,
    database_url: str,
    redis_url: str,
) -> dict[str, str]:
    """Variables of the control plane's processes and management commands; agents inherit them."""
    return {
        **{name: text for name, text in inherited.items() if name not in _NOT_PASSED_ON},
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


def server_environment(inherited: Mapping[str, str], home: Path) -> dict[str, str]:
    """Variables of the embedded servers: no secrets, and no PG* variables, which would change their behaviour."""
    passed_on = {name: text for name, text in inherited.items() if name in {"PATH", "TZ", "LD_LIBRARY_PATH"}}
    return {**passed_on, HOME_MARK: str(home), "LC_ALL": "C"}
