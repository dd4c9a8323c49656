"""A node says what its machine has and what of it is in use."""

import os

from engine_agent.telemetry.host import read_inventory, read_usage


def test_says_what_the_machine_has() -> None:
    seen = read_inventory("cpu-small", "127.0.0.1", 21000)
    assert (seen.instance_type, seen.address, seen.port_base) == ("cpu-small", "127.0.0.1", 21000)
    assert seen.cores >= 1
    assert seen.memory_bytes > 2**28


def test_says_what_is_in_use_and_nothing_of_an_engine_that_is_gone() -> None:
    seen = read_usage(os.getpid())
    assert seen.engine_rss_bytes == seen.agent_rss_bytes
    assert (seen.agent_rss_bytes or 0) > 0
    assert (seen.host_memory_used_bytes or 0) > 0
    assert read_usage(None).engine_rss_bytes is None
    assert read_usage(2**22 + 1).engine_rss_bytes is None
