"""The command line: valid options become settings, and invalid ones get a message."""

import socket
import subprocess
import sys

import pytest

from engine_agent.cell_proxy.__main__ import EXIT_CANNOT_LISTEN, parse_arguments
from engine_agent.cell_proxy.settings import EngineMembers
from tests.engine_agent.cell_proxy.proxy_process import ROOT
from tests.ports import free_port

pytestmark = pytest.mark.processes

WORDS = {
    "--node-id": "n-0a1b2c3d",
    "--cell": "c-1",
    "--generation": "7",
    "--port": "1001",
    "--admin-port": "1003",
    "--engine": "http://127.0.0.1:1004",
    "--model": "tiny",
    "--max-concurrency": "8",
}


def words(**changed: str) -> list[str]:
    every = WORDS | {"--" + name.replace("_", "-"): value for name, value in changed.items()}
    return [word for pair in every.items() for word in pair]


def test_the_words_of_the_agent_become_settings() -> None:
    settings = parse_arguments([*words(max_body_bytes="1000", grace_s="2.5"), "--no-access-log"])
    assert (settings.node_id, settings.cell, settings.generation) == ("n-0a1b2c3d", "c-1", 7)
    assert (settings.engine_host, settings.engine_port) == ("127.0.0.1", 1004)
    assert settings.limits.max_body_bytes == 1000
    assert settings.grace_s == 2.5
    assert settings.access_log is False
    assert settings.max_prompt_tokens is None
    assert parse_arguments(words(max_prompt_tokens="1024")).max_prompt_tokens == 1024
    members = parse_arguments(words(engine_members='{"refused":["grammar"],"sequences":1}')).members
    assert members == EngineMembers(refused=frozenset({"grammar"}), sequences=1)
    assert (settings.members, settings.probes.token_interval_s) == (EngineMembers(), 10.0)
    assert parse_arguments([*words(), "--sleeps"]).probes.token_interval_s == float("inf")
    other = parse_arguments(words(metrics_path="/prometheus/metrics")).metrics_path
    assert (settings.metrics_path, other) == ("/metrics", "/prometheus/metrics")
    assert settings.host == settings.admin_host == "127.0.0.1"


@pytest.mark.parametrize(
    ("option", "value", "complaint"),
    [
        ("port", "0", "'0' is no port"),
        ("port", "http", "'http' is no port"),
        ("engine", "127.0.0.1:1004", "give http://HOST:PORT"),
        ("engine", "https://127.0.0.1:1004", "give http://HOST:PORT"),
        ("engine", "http://127.0.0.1:99999", "give http://HOST:PORT"),
        ("engine", "http://127.0.0.1:1004/v1", "give http://HOST:PORT"),
        ("max_concurrency", "0", "no positive whole number"),
    ],
)
def test_a_wrong_word_is_named(option: str, value: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(words(**{option: value}))
    assert complaint in capsys.readouterr().err


def test_a_taken_port_ends_the_process_with_the_option_in_the_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = words(port=str(free_port()), admin_port=port)
        done = subprocess.run(
            [sys.executable, "-m", "engine_agent.cell_proxy", *command],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    assert done.returncode == EXIT_CANNOT_LISTEN
    assert f"cannot listen on 127.0.0.1:{port} (--admin-port)" in done.stderr
