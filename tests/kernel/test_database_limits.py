"""Every wait of a connection has a limit, and so has every lock."""

from dataclasses import astuple

import pytest
from django.db import OperationalError, connection, transaction

from kernel.process_role import COMMANDS, SERVING, ProcessRole, connection_options


@pytest.mark.parametrize("role", ProcessRole)
def test_every_process_has_every_limit(role: ProcessRole) -> None:
    stated = connection_options({}, role)
    for limit in ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout"):
        assert f"-c {limit}=" in str(stated["options"])
    assert {"connect_timeout", "keepalives", "keepalives_idle", "tcp_user_timeout"} <= set(stated)


def test_whom_somebody_waits_for_gives_up_first() -> None:
    assert astuple(SERVING) < astuple(COMMANDS)
    assert connection_options({}, ProcessRole.CONTROLLER) == connection_options({}, ProcessRole.WEB)


def test_what_the_environment_states_for_connections_stays() -> None:
    assert str(connection_options({"PGOPTIONS": "-c x.y=on"}, ProcessRole.WEB)["options"]).endswith(" -c x.y=on")


@pytest.mark.django_db(transaction=True)
def test_they_hold_on_a_real_connection() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SHOW statement_timeout")
        assert cursor.fetchone() == ("1h",)
        cursor.execute("SHOW idle_in_transaction_session_timeout")
        assert cursor.fetchone() == ("10min",)
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SET LOCAL statement_timeout = '10ms'")
        with pytest.raises(OperationalError, match="statement timeout"):
            cursor.execute("SELECT pg_sleep(60)")
        transaction.set_rollback(True)
