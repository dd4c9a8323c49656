"""All settings of the control plane, from the environment. One file for every process and every place it runs.

Each variable that a person may set has a docstring below its setting. docs/operate/configure.md shows these docstrings
as a table, which `python -m tests.docs.variables_page` writes. "Default: …" goes into the column of the default."""

import gc
import json
import os
import sys
from ipaddress import ip_network
from pathlib import Path
from typing import Any

from engine_agent.protocol.identity import links_are_plain
from engine_agent.protocol.log_lines import log_format
from kernel.process_role import (
    CONTROL_QUEUE,
    BadDatabaseUrl,
    ProcessRole,
    connection_options,
    database_settings,
    process_role,
)

if process_role() is not ProcessRole.COMMAND:
    os.umask(0o077)  # whatever a service writes is its account's own: locks, schedules, metrics, logs

# A tenth of each process's start: what is imported now lives on, and a collection among it finds nothing.
# `ControlplaneConfig.ready` enables it again.
gc.disable()
# Another twentieth: the command line of httpx, with rich and pygments. httpx works without it.
sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]

BASE_DIR = Path(__file__).resolve().parent.parent


def _flag(name: str, default: bool) -> bool:
    return os.environ.get(name, str(int(default))).lower() in {"1", "true", "yes", "on"}


def _list(name: str, default: str) -> list[str]:
    return [part.strip() for part in os.environ.get(name, default).split(",") if part.strip()]


def _figures(name: str, default: str) -> dict[str, float]:
    pairs = [part.partition("=") for part in _list(name, default)]
    try:
        return {key: float(value) for key, _, value in pairs}
    except ValueError:
        raise SystemExit(f"{name} must be a list such as a:b=12,a:c=40, not {os.environ[name]!r}") from None


def _database(url: str) -> dict[str, Any]:
    try:
        return database_settings(url)
    except BadDatabaseUrl as error:
        raise SystemExit(str(error)) from None


def _redis_url_of_home() -> str:
    """Returns the URL of the `make up` with this home, so that `celery inspect` finds the broker."""
    try:
        published = json.loads((SWITCHYARD_HOME / "up.json").read_text())["redis_url"]
    except (OSError, ValueError, TypeError, KeyError):
        published = ""
    return str(published or "redis://127.0.0.1:6379/0")


def _plain_links() -> bool:
    try:
        return links_are_plain(os.environ)
    except ValueError as error:
        raise SystemExit(str(error)) from None


def _networks(name: str) -> list[str]:
    """Returns addresses and networks. A misspelt one must not silently trust no proxy, or every proxy."""
    try:
        return [str(ip_network(part)) for part in _list(name, "")]
    except ValueError as error:
        raise SystemExit(
            f"{name} must be a list of addresses and networks such as 127.0.0.1,10.0.0.0/8: {error}"
        ) from None


# --- Switchyard itself ------------------------------------------------------------------------------------------------

SWITCHYARD_HOME = Path(os.environ.get("SWITCHYARD_HOME", BASE_DIR / ".switchyard")).resolve()
"""Folder of the fleet's state. Default: `.switchyard`"""
SWITCHYARD_CACHE = Path(os.environ.get("SWITCHYARD_CACHE", BASE_DIR / ".cache")).resolve()
"""Folder of engine environments and weights. An agent keeps the folder that it started with. Default: `.cache`"""
SWITCHYARD_PORT = int(os.environ.get("SWITCHYARD_PORT", "8000"))
"""Port of the dashboard and the API."""
SWITCHYARD_INGRESS_PORT = int(os.environ.get("SWITCHYARD_INGRESS_PORT", "8080"))
"""Port of the first region's ingress; the other regions use the next ports. Each ingress also uses the ports 1000
(metrics), 2000 (other regions) and 3000 (TLS) above its port."""
SWITCHYARD_INGRESSES = int(os.environ.get("SWITCHYARD_INGRESSES", "1"))
"""Ingresses of each region of provider `local`. The second ones of all regions use the ports after the first ones. A
smaller number removes none."""
SWITCHYARD_NODE_PORTS = int(os.environ.get("SWITCHYARD_NODE_PORTS", "21000"))
"""First port for new nodes of provider `local`. Each node has a block of 20 ports without those of ingresses."""
SWITCHYARD_LOCAL_LAYOUT = os.environ.get("SWITCHYARD_LOCAL_LAYOUT", "")
"""How provider `local` first divides each region's part of this computer's CPUs into nodes, as `8x1`. Empty: every node
uses all CPUs."""
SWITCHYARD_AGENT_PORT = int(os.environ.get("SWITCHYARD_AGENT_PORT") or SWITCHYARD_PORT + 443)
"""Web's port for agents, with TLS by the fleet's authority. Default: `SWITCHYARD_PORT` + 443"""
PLAIN_LINKS = _plain_links()  # for measurements: no TLS between the parts of a fleet; agents use SWITCHYARD_PORT
SWITCHYARD_AGENT_URL = os.environ.get("SWITCHYARD_AGENT_URL") or (
    f"http://127.0.0.1:{SWITCHYARD_PORT}" if PLAIN_LINKS else f"https://127.0.0.1:{SWITCHYARD_AGENT_PORT}"
)
"""Address of web's port for agents. Several control hosts: their addresses, separated by commas.
Default: `https://127.0.0.1:AGENT_PORT`"""
AGENT_URLS = [url.strip().rstrip("/") for url in SWITCHYARD_AGENT_URL.split(",") if url.strip()]
SWITCHYARD_URL = os.environ.get("SWITCHYARD_URL", f"http://127.0.0.1:{SWITCHYARD_PORT}")
"""Address of web for people, used in messages to them. Default: `http://127.0.0.1:PORT`"""
ARTIFACT_SOURCES = _list("SWITCHYARD_ARTIFACT_SOURCES", (SWITCHYARD_CACHE / "artifacts").as_uri())
"""Folders and buckets whose artifacts may be validated, such as `file:///srv/models,s3://models/llama`, separated by
commas. Default: `file://CACHE/artifacts`"""
ARTIFACT_MAX_GIB = int(os.environ.get("SWITCHYARD_ARTIFACT_MAX_GIB", "4096"))
"""Largest artifact that is validated, in GiB."""
ARTIFACT_LIMIT_S = float(os.environ.get("SWITCHYARD_ARTIFACT_LIMIT_S", "14400"))
"""Longest validation, in seconds."""
IMPORT_STORE = os.environ.get("SWITCHYARD_IMPORT_STORE") or next(iter(ARTIFACT_SOURCES), "")
"""Folder or bucket for imported models, inside `SWITCHYARD_ARTIFACT_SOURCES`. Default: its first entry"""
COMPILE_CACHES = os.environ.get("SWITCHYARD_COMPILE_CACHES") or (
    f"{IMPORT_STORE}/compile-caches" if IMPORT_STORE.startswith("s3://") else str(SWITCHYARD_HOME / "compile-caches")
)
"""Folder or bucket of shared compile caches; several hosts of the control plane share it. Default:
`IMPORT_STORE/compile-caches` in a bucket, else `HOME/compile-caches`"""
COMPILE_CACHE_STORE_GIB = int(os.environ.get("SWITCHYARD_COMPILE_CACHE_STORE_GIB", "20"))
"""GiB of shared compile caches; one may take a quarter. `0`: nodes share none."""
HF_ENDPOINT = os.environ.get("SWITCHYARD_HF_ENDPOINT", "")
"""Hub for imports of `hf://…`: `https://huggingface.co` or a mirror; empty: none, so no request leaves."""
HF_TOKEN = os.environ.get("SWITCHYARD_HF_TOKEN", "")
"""Token for gated and private repositories there. Only the process `jobs` needs it."""
MODELSCOPE_ENDPOINT = os.environ.get("SWITCHYARD_MODELSCOPE_ENDPOINT", "")
"""Hub for imports of `modelscope://…`: `https://modelscope.cn` or a mirror; empty: none."""
MODELSCOPE_TOKEN = os.environ.get("SWITCHYARD_MODELSCOPE_TOKEN", "")
"""Token for repositories there. Only the process `jobs` needs it."""
IMPORT_PICKLES = _flag("SWITCHYARD_IMPORT_PICKLES", False)
"""`1`: weights in Python's pickle format may be imported; loading them can run code on nodes."""
WEBHOOK_NETWORKS = _list("SWITCHYARD_WEBHOOK_NETWORKS", "")
"""Private networks that webhooks may use, such as `10.0.0.0/8`. Plain HTTP is allowed there."""

LOG_LEVEL = os.environ.get("SWITCHYARD_LOG_LEVEL", "INFO")
"""Log level of all processes and commands."""
LOG_FORMAT = str(log_format(os.environ))
"""`SWITCHYARD_LOG_FORMAT`: `json` for structured lines, also of agents and ingresses. Default: `line`"""
METRICS_LISTEN = os.environ.get("SWITCHYARD_METRICS_LISTEN", "")
"""`HOST:PORT` on which a controller, worker or jobs process serves Prometheus metrics, on a host
without web."""
AUDIT_FILE = SWITCHYARD_HOME / "audit" / "records.jsonl"
# On by default, because the owner of the database can rewrite its audit records.
AUDIT_EXPORT = os.environ.get("SWITCHYARD_AUDIT_EXPORT", "") or AUDIT_FILE.as_uri()
"""Destination of audit records, written continuously: `s3://bucket/prefix`, `file:///var/log/switchyard/audit.jsonl`,
`syslog://host:514` or `syslog+tcp://host:6514`; `off`: none. Default: `file://HOME/audit/records.jsonl`"""
if AUDIT_EXPORT == "off":
    AUDIT_EXPORT = ""

USAGE_EXPORT = os.environ.get("SWITCHYARD_USAGE_EXPORT", "")
"""Destination of the daily usage files: `s3://bucket/prefix`; empty: none."""

REQUEST_SAMPLES = int(os.environ.get("SWITCHYARD_REQUEST_SAMPLES", "1000000"))
"""Maximum rows of sampled requests that were answered, about 0.9 GB per million. They are kept for a day, in large
fleets for less"""
FAILED_REQUESTS_MIB = int(os.environ.get("SWITCHYARD_FAILED_REQUESTS_MIB", "512"))
"""Maximum size of sampled requests that failed, a quarter of it for requests without a valid key. They are kept for a
week, or until there are more"""

CONTROL_LOOPS = {
    CONTROL_QUEUE: {
        "fleet.reconcile": 1.0,
        "fleet.provision": 1.0,
        "fleet.cloud": 1.0,
        "fleet.agents": 1.0,
        "traffic.publish": 1.0,
        "traffic.autopilot": 2.0,
        "traffic.autoscale": 5.0,
        "traffic.entry": 5.0,
        "traffic.ensure_ingresses": 1.0,
        "traffic.demand": 5.0,
        "traffic.plan": 5.0,
    },
}
"""Queue -> task -> seconds from one pass to the next. The Celery worker of a queue runs its loops
(kernel.control_loops)."""

REGION_LATENCY_MS = _figures("SWITCHYARD_REGION_LATENCY_MS", "")
"""Measured round trips between regions in ms, such as `us-east-1:us-west-2=62,us-east-1:eu-west-1=71`. Requests spill
to the nearest region. Default: estimated"""

# --- Django -----------------------------------------------------------------------------------------------------------

DEBUG = _flag("SWITCHYARD_DEBUG", False)
"""`1`: Django's debug pages. Never use it in production."""
SECRET_KEY = os.environ.get("SWITCHYARD_SECRET_KEY", "")
"""Signs sessions and opens sealed secrets: 50 or more random characters, the same for all processes. Without it web,
controller, worker and jobs refuse to start. Default: generated by `make up`"""
ALLOWED_HOSTS = _list("SWITCHYARD_ALLOWED_HOSTS", "127.0.0.1,localhost,[::1]")
"""Host names under which web answers, separated by commas. They must include the hosts of `SWITCHYARD_URL` and
`SWITCHYARD_AGENT_URL`."""
CSRF_TRUSTED_ORIGINS = _list("SWITCHYARD_TRUSTED_ORIGINS", "")
"""Origins that may post forms, such as `https://switchyard.example`."""
TRUSTED_PROXIES = _networks("SWITCHYARD_TRUSTED_PROXIES")
"""Addresses and networks of proxies in front of web, such as `127.0.0.1,10.0.0.0/8`. Only their `X-Forwarded-For` and
`X-Forwarded-Proto` count."""
HTTPS = _flag("SWITCHYARD_HTTPS", False)
"""`1`: cookies only over HTTPS, and browsers must use HTTPS (HSTS)."""
SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = HTTPS
SECURE_HSTS_SECONDS = 365 * 86_400 if HTTPS else 0
"""Django sends it with answers over HTTPS only: `X-Forwarded-Proto` of a trusted proxy says so."""
SESSION_COOKIE_NAME = f"switchyard_session_{SWITCHYARD_PORT}"
SESSION_COOKIE_SAMESITE = "Lax"
SESSION_COOKIE_AGE = 2 * 86_400
"""After this long without use a session is over; every use within begins it anew."""
SESSION_LONGEST_S = 7 * 86_400
"""A session is over after a week, however much it is used (OWASP ASVS 5, 7.3.2)."""
DEVICE_COOKIE_NAME = f"switchyard_device_{SWITCHYARD_PORT}"
PENDING_COOKIE_NAME = f"switchyard_pending_{SWITCHYARD_PORT}"
FILES = os.environ.get("SWITCHYARD_FILES") or str(SWITCHYARD_HOME / "files")
"""Store of files and batches: a folder that web, worker and batch of all hosts share, or `s3://bucket/prefix`.
Default: `HOME/files`"""
FILE_MAX_BYTES = int(os.environ.get("SWITCHYARD_FILE_MIB", "200")) * 1024 * 1024
"""Largest file that an application may upload, in MiB: at most 1,024, the limit of ingresses."""
FILE_UPLOAD_MAX_MEMORY_SIZE = 256 * 1024  # the rest of a body goes to a file (controlplane.request_bodies)
BATCH_LINES = int(os.environ.get("SWITCHYARD_BATCH_LINES", "10000000"))
"""Most lines of a batch."""
BATCH_INPUT_BYTES = int(os.environ.get("SWITCHYARD_BATCH_INPUT_MIB", "51200")) * 1024 * 1024
"""Largest input of a batch in a tenant's bucket, in MiB."""
BATCH_AT_RISK = os.environ.get("SWITCHYARD_BATCH_AT_RISK") or "tell"
"""Response to batches that will be late, unless their deployment's policy states one: `tell`, `near_realtime` or
`cells`. Default: `tell`"""
if BATCH_AT_RISK not in {"tell", "near_realtime", "cells"}:
    raise SystemExit(f"SWITCHYARD_BATCH_AT_RISK must be tell, near_realtime or cells, not {BATCH_AT_RISK!r}")
RESPONSES_DAYS = int(os.environ.get("SWITCHYARD_RESPONSES_DAYS", "30"))
"""Days for which responses are stored for applications that request it; `0`: none is stored."""
REQUIRE_SECOND_FACTOR = os.environ.get("SWITCHYARD_REQUIRE_SECOND_FACTOR", "off")
"""Users with a password login who must have a second factor: `off`, `admins` or `all`."""
if REQUIRE_SECOND_FACTOR not in {"off", "admins", "all"}:
    raise SystemExit(f"SWITCHYARD_REQUIRE_SECOND_FACTOR must be off, admins or all, not {REQUIRE_SECOND_FACTOR!r}")
SECURE_CONTENT_TYPE_NOSNIFF = True
X_FRAME_OPTIONS = "DENY"

INSTALLED_APPS = [
    "django.contrib.admin.apps.SimpleAdminConfig",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "django_htmx",
    "django_filters",
    "rest_framework",
    "drf_spectacular",
    "drf_spectacular_sidecar",
    "channels",
    "controlplane",
    "kernel",
    "accounts",
    "audit",
    "controlplane.dashboard",
    "models_registry",
    "fleet",
    "traffic",
]

MIDDLEWARE = [
    "controlplane.observability.middleware.RequestMetricsMiddleware",  # the first: it sees every response
    "django.middleware.security.SecurityMiddleware",
    "controlplane.static_files.StaticFilesMiddleware",
    "controlplane.dashboard.middleware.ContentSecurityPolicy",
    "controlplane.borders.TextMiddleware",  # before whatever asks the database by a cookie or a path
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "accounts.middleware.PasswordLoginMiddleware",  # before whatever asks the database
    "accounts.middleware.SessionTrackingMiddleware",
    "accounts.middleware.SecondFactorEnrolmentMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "django_htmx.middleware.HtmxMiddleware",
    "audit.middleware.AuditMiddleware",  # the last: it calls the view itself
]

ROOT_URLCONF = "controlplane.urls"
ASGI_APPLICATION = "controlplane.asgi.application"
TEMPLATES: list[dict[str, Any]] = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
                "kernel.access.may",
            ],
            "builtins": ["controlplane.dashboard.templatetags.form_guards"],
            "libraries": {"yard": "controlplane.dashboard.yard_bars", "marks": "fleet.regions.pages.marks"},
        },
    },
]

DATABASE_POOL = int(os.environ.get("SWITCHYARD_DATABASE_POOL", "0"))
"""Connections shared by the threads of a process; `0`: one for each thread. PostgreSQL must accept those of all web
processes. Default: `32` in web, else `0`"""
_stated = _database(os.environ.get("DATABASE_URL", "postgres://switchyard@127.0.0.1:5432/switchyard"))
"""`postgres://user:password@host:5432/name`, or several hosts: `…@db1:5432,db2:5432/name`. Default: embedded"""
DATABASES = {
    "default": {
        **_stated,
        "ENGINE": "kernel.postgresql",
        "CONN_MAX_AGE": 0 if DATABASE_POOL else 600,  # the first passes on a new connection cost ten times as much
        "CONN_HEALTH_CHECKS": True,
        "OPTIONS": {
            **connection_options(os.environ, has_standby="," in _stated["HOST"]),
            **_stated["OPTIONS"],
            **({"pool": {"min_size": 1, "max_size": DATABASE_POOL, "timeout": 10}} if DATABASE_POOL else {}),
        },
    },
}

PASSWORD_HASHERS = ["accounts.hashing.SlottedPasswordHasher"]
AUTH_PASSWORD_VALIDATORS = [
    {
        "NAME": "django.contrib.auth.password_validation.MinimumLengthValidator",
        "OPTIONS": {"min_length": 12},
    },
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
    {"NAME": "django.contrib.auth.password_validation.NumericPasswordValidator"},
    {"NAME": "django.contrib.auth.password_validation.UserAttributeSimilarityValidator"},
]
ACCESS_SOURCE = "accounts.selectors.access_of_user"
"""Says what a user may do (kernel.access)."""
LOGIN_URL = "login"
LOGIN_REDIRECT_URL = "overview"
LOGOUT_REDIRECT_URL = "login"

LANGUAGE_CODE = "en-us"
TIME_ZONE = "UTC"
USE_TZ = True
OIDC_ISSUER = os.environ.get("SWITCHYARD_OIDC_ISSUER", "")
"""OpenID provider for logins, exactly as it names itself, such as `https://login.example/realms/ops`. It and the other
variables replace the provider that an admin has set."""
OIDC_CLIENT_ID = os.environ.get("SWITCHYARD_OIDC_CLIENT_ID", "switchyard")
"""Client id of Switchyard at the provider."""
OIDC_CLIENT_SECRET = os.environ.get("SWITCHYARD_OIDC_CLIENT_SECRET", "")
"""Secret of that client."""
OIDC_TITLE = os.environ.get("SWITCHYARD_OIDC_TITLE", "single sign-on")
"""The provider's name on the login page."""
OIDC_SCOPES = os.environ.get("SWITCHYARD_OIDC_SCOPES", "openid profile email")
"""Scopes requested from the provider; some also need `groups`."""
OIDC_GROUPS_CLAIM = os.environ.get("SWITCHYARD_OIDC_GROUPS_CLAIM", "groups")
"""Claim that lists a user's groups."""
OIDC_ADMIT_ALL = _flag("SWITCHYARD_OIDC_ADMIT_ALL", False)
"""`1`: users in no mapped group are viewers; otherwise they are refused."""
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

STATIC_URL = "/static/"
WHITENOISE_USE_FINDERS = True
STORAGES = {"staticfiles": {"BACKEND": "controlplane.static_files.HashedStaticFiles"}}

# --- Valkey/Redis: wake-ups and hints, all of which may be lost -------------------------------------------------------

REDIS_URL = os.environ.get("REDIS_URL") or _redis_url_of_home()
"""Valkey or Redis: `redis://host:6379/0`. Default: embedded"""

CHANNEL_LAYERS = {
    "default": {
        "BACKEND": "kernel.live.ChannelLayer",
        "CONFIG": {"hosts": [REDIS_URL], "prefix": "switchyard"},
    },
}

# --- API --------------------------------------------------------------------------------------------------------------

API_READS_PER_MIN = int(os.environ.get("SWITCHYARD_API_READS_PER_MIN", "12000"))
"""Read requests of one user a minute, whatever the token; `0`: no limit."""
API_WRITES_PER_MIN = int(os.environ.get("SWITCHYARD_API_WRITES_PER_MIN", "1200"))
"""Write requests of one user a minute."""
API_ANONYMOUS_REQUESTS_PER_MIN = int(os.environ.get("SWITCHYARD_API_STRANGER_REQUESTS_PER_MIN", "1200"))
"""Requests of one address a minute without a valid token or session."""

REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": [
        "accounts.permissions.BearerTokenAuthentication",
        "rest_framework.authentication.SessionAuthentication",
    ],
    "DEFAULT_PERMISSION_CLASSES": ["kernel.access.RolePermission"],
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
    "DEFAULT_PARSER_CLASSES": ["controlplane.api.parsers.BoundedJSONParser"],
    "DEFAULT_FILTER_BACKENDS": [
        "controlplane.api.filters.StrictFilterBackend",
        "controlplane.api.filters.Ordering",
        "controlplane.api.filters.WatchParameters",
    ],
    "DEFAULT_THROTTLE_CLASSES": ["kernel.rest.throttling.CallerRateThrottle"],
    "DEFAULT_PAGINATION_CLASS": "controlplane.api.pagination.CursorPages",
    "DEFAULT_SCHEMA_CLASS": "controlplane.api.auto_schema.ConventionsSchema",
    "EXCEPTION_HANDLER": "controlplane.api.problems.answer_problem",
    "URL_FORMAT_OVERRIDE": None,
}
SPECTACULAR_SETTINGS = {
    "TITLE": "Switchyard",
    "DESCRIPTION": "Control plane for LLM inference fleets: regions, nodes, cells, deployments and their traffic.",
    "VERSION": "1",
    "LICENSE": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
    "OAS_VERSION": "3.1.0",
    "SERVE_INCLUDE_SCHEMA": False,
    "SERVE_PERMISSIONS": ["rest_framework.permissions.AllowAny"],
    "SWAGGER_UI_DIST": "SIDECAR",
    "SWAGGER_UI_FAVICON_HREF": "SIDECAR",
    "REDOC_DIST": "SIDECAR",
    "SERVE_AUTHENTICATION": [],
    "SCHEMA_PATH_PREFIX": "/api/v1",
    "COMPONENT_SPLIT_REQUEST": True,
    "COMPONENT_SPLIT_PATCH": False,
    "ENUM_GENERATE_CHOICE_DESCRIPTION": False,
    "PREPROCESSING_HOOKS": ["controlplane.api.schema.one_spelling"],
    "POSTPROCESSING_HOOKS": [
        "drf_spectacular.hooks.postprocess_schema_enums",
        "controlplane.api.schema.with_problems",
        "controlplane.api.examples.with_examples",
    ],
    "ENUM_NAME_OVERRIDES": {
        "Role": "controlplane.api.enums.ROLES_OF_PEOPLE",
        "Scope": "controlplane.api.enums.TOKEN_SCOPES",
        "ApprovalState": "controlplane.api.enums.APPROVALS",
        "DocumentKind": "controlplane.api.enums.DOCUMENT_KINDS",
        "DocumentAction": "controlplane.api.enums.DOCUMENT_ACTIONS",
        "ScalingMode": "controlplane.api.enums.SCALING_MODES",
        "Preempts": "controlplane.api.enums.PREEMPTS",
        "ScalingRule": "controlplane.api.enums.SCALING_RULES",
        "CellState": "controlplane.api.enums.CELL_STATES",
        "DraftState": "controlplane.api.enums.DRAFT_STATES",
        "NodeState": "controlplane.api.enums.NODE_STATES",
        "NodeRole": "controlplane.api.enums.NODE_ROLES",
        "CapacityMarket": "controlplane.api.enums.CAPACITY_MARKETS",
        "CapacityPoolState": "controlplane.api.enums.CAPACITY_POOL_STATES",
        "CapacityPoolOrigin": "controlplane.api.enums.CAPACITY_POOL_ORIGINS",
        "ImageMoveState": "controlplane.api.enums.IMAGE_MOVE_STATES",
        "MachineState": "controlplane.api.enums.MACHINE_STATES",
        "MachineRole": "controlplane.api.enums.MACHINE_ROLES",
        "InvitationState": "controlplane.api.enums.INVITATIONS",
        "RolloutState": "controlplane.api.enums.ROLLOUT_STATES",
        "GateFinding": "controlplane.api.enums.GATE_FINDINGS",
        "IncidentState": "controlplane.api.enums.INCIDENT_STATES",
        "ServingClass": "controlplane.api.enums.SERVING_CLASSES",
        "EngineState": "controlplane.api.enums.ENGINE_STATES",
        "MemberRole": "controlplane.api.enums.MEMBER_ROLES",
        "VersionState": "controlplane.api.enums.VERSION_STATES",
        "ValidationState": "controlplane.api.enums.VALIDATION_STATES",
        "JobState": "controlplane.api.enums.JOB_STATES",
        "DiffChange": "controlplane.api.enums.CHANGES",
        "BatchSinkKind": "controlplane.api.enums.SINK_KINDS",
        "Tone": "controlplane.api.enums.TONES",
        "AuditOutcome": "controlplane.api.enums.AUDIT_OUTCOMES",
        "AuditProof": "controlplane.api.enums.AUDIT_PROOFS",
        "WebhookFormat": "controlplane.api.enums.WEBHOOK_FORMATS",
        "EventsEnum": "controlplane.api.enums.WEBHOOK_EVENTS",
        "BatchEvent": "controlplane.api.enums.BATCH_EVENTS",
        "KeyState": "controlplane.api.enums.KEY_STATES",
        "RuleMode": "controlplane.api.enums.RULE_MODES",
        "ShiftKind": "controlplane.api.enums.SHIFT_KINDS",
        "OverrideKind": "controlplane.api.enums.OVERRIDE_KINDS",
        "EvacuationMode": "controlplane.api.enums.EVACUATION_MODES",
        "RateKind": "controlplane.api.enums.RATE_KINDS",
        "FigureSource": "controlplane.api.enums.FIGURE_SOURCES",
    },
}

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {
        "line": {"()": "engine_agent.protocol.log_lines.PlainLines", "fmt": "%(levelname)s %(name)s: %(message)s"},
        "json": {"()": "controlplane.observability.log_format.json_lines"},
    },
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": LOG_FORMAT}},
    "root": {"handlers": ["stderr"], "level": LOG_LEVEL},
    "loggers": {
        "django.request": {"level": "ERROR"},
        # A line for every task of the schedule would bury the decisions.
        "celery.worker.strategy": {"level": "WARNING"},
        "celery.app.trace": {"level": "WARNING"},
        # Nor is a line for every request that is sent through an ingress of use.
        "httpx": {"level": "WARNING"},
    },
}
