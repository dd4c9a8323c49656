from pathlib import Path

from controlplane.embedded.configuration import read_configuration
from controlplane.embedded.processes import HOME_MARK, control_plane_environment, server_environment
from controlplane.embedded.state_directory import Secrets

SECRETS = Secrets(secret_key="key", operator_password="word")


def _environment(inherited: dict[str, str]) -> dict[str, str]:
    configuration = read_configuration({"SWITCHYARD_HOME": "/h", "SWITCHYARD_PORT": "9"}, Path("/checkout"))
    return control_plane_environment(inherited, configuration, SECRETS, database_url="postgres://d", redis_url="unix:r")


def test_the_control_plane_learns_everything_from_its_environment() -> None:
    wanted = {
        "DATABASE_URL": "postgres://d",
        "REDIS_URL": "unix:r",
        "SWITCHYARD_HOME": "/h",
        "SWITCHYARD_CACHE": "/checkout/.cache",
        "SWITCHYARD_PORT": "9",
        "SWITCHYARD_INGRESS_PORT": "8080",
        "SWITCHYARD_INGRESSES": "1",
        "SWITCHYARD_SECRET_KEY": "key",
        "DJANGO_SETTINGS_MODULE": "controlplane.settings",
        HOME_MARK: "/h",
    }
    assert wanted.items() <= _environment({}).items()


def test_the_launchers_word_counts_more_than_what_it_inherited() -> None:
    assert _environment({"SWITCHYARD_PORT": "8000", "DATABASE_URL": "old"})["SWITCHYARD_PORT"] == "9"


def test_other_variables_pass_through_but_those_of_make_do_not() -> None:
    environment = _environment({"LANG": "C", "MAKEFLAGS": "-j4", "MAKELEVEL": "1", "DETACH": "1"})
    assert environment["LANG"] == "C"
    assert not {"MAKEFLAGS", "MAKELEVEL", "DETACH"} & environment.keys()


def test_the_operators_password_is_only_for_the_command_that_seeds() -> None:
    assert "word" not in _environment({}).values()


def test_servers_get_no_secret_and_nothing_that_bends_them() -> None:
    environment = server_environment({"PATH": "/bin", "PGPORT": "1", "SWITCHYARD_SECRET_KEY": "key"}, Path("/h"))
    assert environment == {"PATH": "/bin", HOME_MARK: "/h", "LC_ALL": "C"}
