from typing import Any

from django.apps import AppConfig

from kernel.clock import compare_with
from kernel.process_role import backend_place


class KernelConfig(AppConfig):
    """For each new connection, compares the clock with PostgreSQL's if the last comparison is old, and gives the
    backend this process's priority. Refuses to migrate a database of an older layout."""

    name = "kernel"
    label = "kernel"

    def ready(self) -> None:
        from django.db.backends.signals import connection_created
        from django.db.models.signals import pre_migrate

        from kernel.schema_layout import refuse_older_layout

        connection_created.connect(_compare_clocks, dispatch_uid="kernel.clock")
        connection_created.connect(_place_backend, dispatch_uid="kernel.process_role")
        pre_migrate.connect(refuse_older_layout, sender=self, dispatch_uid="kernel.schema_layout")


def _place_backend(connection: Any, **_: Any) -> None:
    if connection.vendor == "postgresql":
        known = connection.connection.info
        backend_place(known.backend_pid, known.host)


def _compare_clocks(connection: Any, **_: Any) -> None:
    if connection.vendor == "postgresql":
        compare_with(connection.connection)
