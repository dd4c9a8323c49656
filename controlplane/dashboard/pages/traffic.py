"""Where requests go: shares of regions and what holds them there, ingresses, and the routing tables they follow."""

from controlplane.dashboard.charts import Chart
from controlplane.dashboard.fragments import Asked, Fragment, Page
from controlplane.dashboard.selectors.share_history import share_charts
from controlplane.dashboard.selectors.steering import (
    MatrixTable,
    Order,
    ShiftRow,
    matrix_tables,
    orders_in_force,
    shift_rows,
)
from controlplane.dashboard.selectors.traffic import IngressRow, TableRow, ingress_rows, table_rows


def _shares(asked: Asked) -> tuple[MatrixTable, ...]:
    return matrix_tables()


def _orders(asked: Asked) -> tuple[Order, ...]:
    return orders_in_force(now=asked.now)


def _shifts(asked: Asked) -> tuple[ShiftRow, ...]:
    return shift_rows()


def _history(asked: Asked) -> tuple[Chart, ...]:
    return share_charts(asked.now)


def _ingresses(asked: Asked) -> tuple[IngressRow, ...]:
    return ingress_rows(now=asked.now)


def _tables(asked: Asked) -> tuple[TableRow, ...]:
    return table_rows()


TRAFFIC = Page(
    section="traffic",
    title="Traffic",
    charts=True,
    fragments=(
        Fragment("shares", "Who serves whose requests", ("traffic",), "dashboard/traffic/shares.html", _shares),
        Fragment("orders", "Orders in force", ("traffic",), "dashboard/traffic/orders.html", _orders),
        Fragment("history", "Shares over time", ("traffic",), "dashboard/charts/several.html", _history),
        Fragment("ingresses", "Ingresses", ("traffic",), "dashboard/traffic/ingresses.html", _ingresses),
        Fragment("shifts", "Why shares changed", ("traffic",), "dashboard/traffic/shifts.html", _shifts),
        Fragment("tables", "Published routing tables", ("traffic",), "dashboard/traffic/tables.html", _tables),
    ),
)
