"""From whom a request comes: as the connection says, unless it is a configured proxy's."""

import json
import os
import subprocess
import sys

import pytest

from controlplane import asgi, web

PROGRAM = """
import asyncio, importlib, json
from django.conf import settings
from controlplane import asgi

async def client_of(host):
    seen = []
    async def inner(scope, receive, send):
        seen.append([scope["client"][0], scope["scheme"]])
    application = asgi.application
    if application is asgi.plain_routes:
        application = inner
    else:
        application.app = inner
    headers = [(b"x-forwarded-for", b"203.0.113.9, 198.51.100.7"), (b"x-forwarded-proto", b"https")]
    scope = {"type": "http", "client": (host, 5000), "scheme": "http", "headers": headers}
    await application(scope, None, None)
    return seen[0]

def clients():
    return [asyncio.run(client_of(host)) for host in ("127.0.0.1", "10.1.2.3")]

with_a_proxy = clients()
settings.TRUSTED_PROXIES = []
importlib.reload(asgi)
print(json.dumps([with_a_proxy, clients()]))
"""


@pytest.mark.slow
def test_forwarded_headers_count_from_configured_proxies_only() -> None:
    environment = {**os.environ, "SWITCHYARD_TRUSTED_PROXIES": "10.0.0.0/8"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    with_a_proxy, without_one = json.loads(done.stdout)
    assert with_a_proxy == [["127.0.0.1", "http"], ["198.51.100.7", "https"]]
    assert without_one == [["127.0.0.1", "http"], ["10.1.2.3", "http"]]


def test_uvicorn_believes_nobody_by_itself() -> None:
    for application in (asgi.application, asgi.agents_application):
        assert web.server_config(application).proxy_headers is False
