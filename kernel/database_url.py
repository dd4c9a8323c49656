"""`DATABASE_URL` as Django's settings take it. Pure.

It is libpq's own form, so it may name several hosts, of which one takes writes at a time:
`postgres://user:password@db1:5432,db2:5432/name?sslmode=verify-full`.
"""

from typing import Any

SCHEMES = ("postgres://", "postgresql://")


class BadDatabaseUrl(ValueError):
    """The text is no such URL; it says what is wrong with it, without the password."""


def database_settings(url: str) -> dict[str, Any]:
    """`NAME`, `USER`, `PASSWORD`, `HOST`, `PORT` and, in `OPTIONS`, what else the URL states.

    Of several hosts only one that takes writes counts, unless the URL says otherwise (`target_session_attrs`).

    Raises:
        BadDatabaseUrl: it is not such a URL.
    """
    from psycopg import ProgrammingError
    from psycopg.conninfo import conninfo_to_dict

    if not url.startswith(SCHEMES):
        raise BadDatabaseUrl("DATABASE_URL must be postgres://USER:PASSWORD@HOST:PORT/NAME, of several hosts HOST,HOST")
    try:
        stated = {name: str(value) for name, value in conninfo_to_dict(url).items() if value is not None}
    except ProgrammingError as error:
        raise BadDatabaseUrl(f"DATABASE_URL cannot be read: {_without_secrets(str(error), url)}") from None
    host, port = stated.pop("host", ""), stated.pop("port", "")
    if "," in host:
        _require_a_port_of_each(host, port)
        stated.setdefault("target_session_attrs", "read-write")
    return {
        "NAME": stated.pop("dbname", ""),
        "USER": stated.pop("user", ""),
        "PASSWORD": stated.pop("password", ""),
        "HOST": host,
        "PORT": port,
        "OPTIONS": stated,
    }


def _require_a_port_of_each(host: str, port: str) -> None:
    hosts, ports = host.count(",") + 1, port.count(",") + 1
    if ports not in {1, hosts}:
        raise BadDatabaseUrl(f"DATABASE_URL names {hosts} hosts and {ports} ports: give each host its port, or all one")


def _without_secrets(text: str, url: str) -> str:
    """libpq repeats the URL, or the part that it could not read."""
    return " ".join(text.replace(url, "it").split()) if "@" not in text.replace(url, "") else "its form is wrong"
