from pathlib import Path

import pytest

from controlplane.embedded.configuration import CannotStart, Engine, Provider, read_configuration
from controlplane.embedded.control_plane import service

CHECKOUT = Path("/srv/switchyard")


def test_an_empty_environment_gives_the_defaults() -> None:
    configuration = read_configuration({}, CHECKOUT)
    assert configuration.home == CHECKOUT / ".switchyard"
    assert configuration.cache == CHECKOUT / ".cache"
    assert (configuration.port, configuration.agent_port) == (8000, 8443)
    assert configuration.ingress_ports == {"i-us-east-1": 8080, "i-us-west-2": 8081}
    assert configuration.engine is Engine.VLLM
    assert (configuration.agent_listen, configuration.provider) == ("127.0.0.1", Provider.LOCAL)
    assert configuration.wait_s == 600.0
    assert (configuration.database_url, configuration.redis_url) == (None, None)


def test_an_empty_variable_counts_as_unset() -> None:
    empty = dict.fromkeys(("SWITCHYARD_HOME", "SWITCHYARD_PORT", "ENGINE", "WAIT_S", "DATABASE_URL"), "")
    assert read_configuration(empty, CHECKOUT) == read_configuration({}, CHECKOUT)


def test_the_environment_decides() -> None:
    configuration = read_configuration(
        {"SWITCHYARD_HOME": "/data/home", "SWITCHYARD_INGRESS_PORT": "9000", "ENGINE": "sim", "WAIT_S": "0.5"}, CHECKOUT
    )
    assert configuration.home == Path("/data/home")
    assert configuration.ingress_ports == {"i-us-east-1": 9000, "i-us-west-2": 9001}
    assert configuration.engine is Engine.SIM
    assert configuration.wait_s == 0.5


def test_the_second_ingresses_follow_the_first_ones() -> None:
    assert read_configuration({"SWITCHYARD_INGRESSES": "2"}, CHECKOUT).ingress_ports == {
        "i-us-east-1": 8080,
        "i-us-west-2": 8081,
        "i-us-east-1-2": 8082,
        "i-us-west-2-2": 8083,
    }


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("SWITCHYARD_PORT", "http", "SWITCHYARD_PORT is 'http': give a port from 1 to 65535."),
        ("SWITCHYARD_PORT", "0", "SWITCHYARD_PORT is '0': give a port from 1 to 65535."),
        ("SWITCHYARD_PORT", "-1", "SWITCHYARD_PORT is '-1': give a port from 1 to 65535."),
        ("SWITCHYARD_PORT", "٨٠٨٠", "SWITCHYARD_PORT is '٨٠٨٠': give a port from 1 to 65535."),
        ("SWITCHYARD_INGRESS_PORT", "65535", "SWITCHYARD_INGRESS_PORT is '65535': give a port from 1 to 65534."),
        ("SWITCHYARD_INGRESSES", "0", "SWITCHYARD_INGRESSES is '0': give a number from 1 to 8."),
        ("SWITCHYARD_INGRESSES", "1e9", "SWITCHYARD_INGRESSES is '1e9': give a number from 1 to 8."),
        ("ENGINE", "llama", "ENGINE is 'llama': give one of vllm, llama-cpp, triton, sim."),
        ("SWITCHYARD_DEMO_PROVIDER", "gcp", "SWITCHYARD_DEMO_PROVIDER is 'gcp': give one of local, machines, aws."),
        (
            "SWITCHYARD_AGENT_LISTEN",
            "c1",
            "SWITCHYARD_AGENT_LISTEN is 'c1': give an address of this host, or 0.0.0.0 for all.",
        ),
        ("WAIT_S", "soon", "WAIT_S is 'soon': give a number of seconds above 0."),
        ("WAIT_S", "0", "WAIT_S is '0': give a number of seconds above 0."),
        ("WAIT_S", "nan", "WAIT_S is 'nan': give a number of seconds above 0."),
    ],
)
def test_a_bad_value_is_named_with_what_would_be_right(name: str, text: str, sentence: str) -> None:
    with pytest.raises(CannotStart) as refusal:
        read_configuration({name: text}, CHECKOUT)
    assert str(refusal.value) == sentence


def test_other_hosts_may_join_and_run_the_demo() -> None:
    configuration = read_configuration(
        {"SWITCHYARD_AGENT_LISTEN": "10.0.0.1", "SWITCHYARD_DEMO_PROVIDER": "machines"}, CHECKOUT
    )
    assert (configuration.agent_listen, configuration.provider) == ("10.0.0.1", Provider.MACHINES)
    assert "10.0.0.1" in service("web", configuration, {}).program.arguments
