"""Where requests go: ingresses, and the routing tables they follow."""

from controlplane.dashboard.fragments import Asked, Fragment, Page
from controlplane.dashboard.selectors.traffic import IngressRow, TableRow, ingress_rows, table_rows


def _ingresses(asked: Asked) -> tuple[IngressRow, ...]:
    return ingress_rows(now=asked.now)


def _tables(asked: Asked) -> tuple[TableRow, ...]:
    return table_rows()


TRAFFIC = Page(
    section="traffic",
    title="Traffic",
    fragments=(
        Fragment("ingresses", "Ingresses", ("traffic",), "dashboard/traffic/ingresses.html", _ingresses),
        Fragment("tables", "Published routing tables", ("traffic",), "dashboard/traffic/tables.html", _tables),
    ),
)
