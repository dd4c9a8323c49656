"""The control plane's own processes and commands, as command lines. Pure: builds programs, starts none."""

import signal
import sys
from collections.abc import Mapping

from controlplane.embedded.configuration import CHECKOUT, Configuration
from controlplane.embedded.home import Home
from controlplane.embedded.preflight import HOST
from controlplane.embedded.spawning import Program
from controlplane.embedded.supervised import Service

WORKER_CONCURRENCY = 2
MAX_FRAME_BYTES = 256 * 1024
"""The agent protocol's limit (engine_agent.protocol.codec)."""
_WEB_GRACE_S = 3
UNCHECKED = {"CELERY_SKIP_CHECKS": "1"}
"""Django's checks load the whole API; `migrate` has run them just before. Without them a worker starts sooner."""


def web(configuration: Configuration, environment: Mapping[str, str]) -> Service:
    """The ASGI server: dashboard, API, agents' and browsers' WebSockets."""
    arguments = ["uvicorn", "controlplane.asgi:application", "--host", HOST, "--port", str(configuration.port)]
    arguments += ["--ws", "websockets-sansio", "--ws-max-size", str(MAX_FRAME_BYTES)]
    arguments += ["--ws-per-message-deflate", "false", "--no-access-log", "--lifespan", "off"]
    arguments += ["--timeout-graceful-shutdown", str(_WEB_GRACE_S), "--no-use-colors"]
    arguments += ["--log-level", "warning"]
    return Service(name="web", program=_python(arguments, environment), stop_within_s=_WEB_GRACE_S + 5.0)


def worker(environment: Mapping[str, str]) -> Service:
    """Celery's worker. On the launcher's death it stops cold: its tasks are acknowledged late and come again."""
    arguments = ["celery", "--quiet", "-A", "controlplane.celery:app", "worker"]
    arguments += ["--without-gossip", "--without-mingle"]
    arguments += ["--pool", "prefork", "--concurrency", str(WORKER_CONCURRENCY), "--loglevel", "info"]
    program = _python(arguments, {**environment, **UNCHECKED}, death_signal=signal.SIGQUIT)
    return Service(name="worker", program=program, stop_within_s=10.0)


def beat(home: Home, environment: Mapping[str, str]) -> Service:
    """Celery's clock."""
    arguments = ["celery", "--quiet", "-A", "controlplane.celery:app", "beat", "--schedule", str(home.beat_schedule)]
    arguments += ["--pidfile=", "--loglevel", "warning"]
    return Service(name="beat", program=_python(arguments, {**environment, **UNCHECKED}), stop_within_s=5.0)


def sender(environment: Mapping[str, str]) -> Service:
    """Sends near-real-time requests. What it has not finished at its end, it gives back."""
    return Service(name="sender", program=management_command(["sender"], environment), stop_within_s=5.0)


def management_command(arguments: list[str], environment: Mapping[str, str]) -> Program:
    """One of Django's or our own commands."""
    return Program(arguments=(sys.executable, "manage.py", *arguments), environment=environment, folder=CHECKOUT)


def _python(
    arguments: list[str], environment: Mapping[str, str], *, death_signal: signal.Signals = signal.SIGTERM
) -> Program:
    return Program(
        # Celery's advice not to run as root is for workers that unpickle what strangers send; ours reads JSON of ours.
        arguments=(sys.executable, "-W", "ignore:You're running the worker", "-m", *arguments),
        environment=environment,
        folder=CHECKOUT,
        death_signal=death_signal,
    )
