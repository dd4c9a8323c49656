"""Whether every ingress follows the table in force and sees the cells in it."""

from traffic.models import Ingress
from traffic.selectors.routing import latest_tables


def ingresses_waiting() -> tuple[str, ...]:
    """What keeps requests from being answered, a sentence each; empty when nothing does."""
    tables = latest_tables()
    waiting = []
    for ingress in Ingress.objects.select_related("report"):
        table, report = tables.get(ingress.region_id), getattr(ingress, "report", None)
        if table is None:
            waiting.append(f"{ingress.region_id} has no routing table yet")
        elif report is None or not report.connected:
            waiting.append(f"ingress {ingress.id} is not connected")
        elif report.revision < table.revision:
            waiting.append(f"ingress {ingress.id} runs revision {report.revision} of {table.revision}")
        else:
            routed = [cell["cell"] for pool in table.body["pools"] for cell in pool["cells"] if not cell["drain"]]
            waiting += [
                f"ingress {ingress.id} sees {cell} {report.cells.get(cell, 'not at all')}"
                for cell in routed
                if report.cells.get(cell) != "up"
            ]
    return tuple(waiting)
