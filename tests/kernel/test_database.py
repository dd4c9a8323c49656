"""`DATABASE_URL`, of one host and of several."""

import pytest

from kernel.postgresql.base import in_order
from kernel.process_role import BadDatabaseUrl, ProcessRole, connection_options, database_settings


def test_one_host_with_everything_escaped_that_may_be() -> None:
    assert database_settings("postgres://own%40er:p%2Fw@db:5433/fleet?sslmode=verify-full") == {
        "NAME": "fleet",
        "USER": "own@er",
        "PASSWORD": "p/w",
        "HOST": "db",
        "PORT": "5433",
        "OPTIONS": {"sslmode": "verify-full"},
    }


def test_a_folder_of_sockets_is_a_host() -> None:
    assert database_settings("postgres://role@%2Ftmp%2Fsockets/fleet")["HOST"] == "/tmp/sockets"


def test_of_several_hosts_the_one_that_takes_writes_unless_the_url_says_otherwise() -> None:
    stated = database_settings("postgresql://u@db1:5432,db2:5433/fleet")
    assert (stated["HOST"], stated["PORT"]) == ("db1,db2", "5432,5433")
    assert stated["OPTIONS"] == {"target_session_attrs": "read-write"}
    stated = database_settings("postgres://u@db1,db2/fleet?target_session_attrs=any")
    assert stated["OPTIONS"] == {"target_session_attrs": "any"}


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("mysql://u:hidden@db/fleet", "must be postgres://"),
        ("postgres://u:hidden@db:port/fleet?nonsense", "DATABASE_URL cannot be read"),
        ("postgres://u:hidden@db1:1,db2:2,db3/fleet?sslmode", "DATABASE_URL cannot be read"),
        ("postgres://u:hidden@a,b,c:5/fleet?port=1,2", "3 hosts and 2 ports"),
    ],
)
def test_a_bad_url_is_refused_by_what_is_wrong_without_its_password(url: str, says: str) -> None:
    with pytest.raises(BadDatabaseUrl, match=says) as refusal:
        database_settings(url)
    assert "hidden" not in str(refusal.value)


def test_whoever_has_a_standby_waits_less_for_a_host_that_says_nothing() -> None:
    alone = connection_options({}, ProcessRole.WEB)
    paired = connection_options({}, ProcessRole.WEB, has_standby=True)
    assert paired.keys() == alone.keys()
    assert all(int(str(paired[name])) <= int(str(alone[name])) for name in alone if name != "options")
    silent_s = int(str(paired["keepalives_idle"])) + int(str(paired["keepalives_interval"])) * int(
        str(paired["keepalives_count"])
    )
    assert silent_s + int(str(paired["connect_timeout"])) <= 10  # of the 15 s of I8


def test_the_host_that_answered_last_is_asked_first() -> None:
    several = {"host": "a,b,c", "port": "1,2,3", "user": "u"}
    assert in_order(several, ("b", "2")) == {"host": "b,a,c", "port": "2,1,3", "user": "u"}
    assert in_order({"host": "a,b", "port": "5"}, ("b", "5")) == {"host": "b,a", "port": "5,5"}
    assert in_order(several, ("b", "9")) == several
    assert in_order({"host": "a", "port": "1"}, ("a", "1")) == {"host": "a", "port": "1"}
    assert in_order({}, ("", "")) == {}
