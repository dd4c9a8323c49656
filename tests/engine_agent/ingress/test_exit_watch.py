"""The exit of a followed process is reported, also of one that is no child."""

import asyncio
import subprocess

import pytest

from engine_agent.ingress.exit_watch import ExitWatch

pytestmark = pytest.mark.asyncio


async def test_the_exit_of_a_followed_process_is_reported_once() -> None:
    exits = asyncio.Event()
    watch = ExitWatch(exits.set)
    child = subprocess.Popen(["/bin/sleep", "600"])  # noqa: ASYNC220
    try:
        assert watch.follow([child.pid])
        assert not exits.is_set()
    finally:
        child.kill()
    await exits.wait()
    assert not watch.follow([child.pid]), "its follower has to find out itself what became of it"
    assert watch.follow([]), "no process is followed"
    child.wait()
    watch.close()


async def test_a_process_that_does_not_exist_has_to_be_polled() -> None:
    assert not ExitWatch(lambda: None).follow([2**22 + 1])
