"""What publication reads of a large fleet, cells that can be routed and tables in force: loaded whole once, and then
only what has changed. Whoever makes many passes keeps one; a new one looks at everything.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import or_
from time import monotonic

from django.db.models import Q

from engine_agent.protocol.ingress_messages import RoutingTable as TableMessage
from engine_agent.protocol.messages import JsonObject
from engine_agent.protocol.ports import PROXY
from fleet.models import Cell
from kernel.row_cache import FullLooks, RowCache
from models_registry.models import ModelVersion
from traffic.models import RoutingTable
from traffic.planning.ingress import TableInForce
from traffic.planning.routing import RoutableCell
from traffic.selectors.key import KEY_RING
from traffic.selectors.routing import UnreadableTable, latest_revisions, routed_cells, table_message


@dataclass(frozen=True, slots=True)
class KnownTable:
    """The newest table of a region, or why nobody can read it. `keys`: which version of the keys goes with it."""

    revision: int
    message: TableMessage | None
    keys: JsonObject
    problem: UnreadableTable | None = None


class RoutingCache:
    """For one thread. `published`: what the last pass that had nothing to publish looked at."""

    def __init__(self, now_s: Callable[[], float] = monotonic) -> None:
        self._looks = FullLooks(now_s)
        self._forget()

    def _forget(self) -> None:
        self._cells = RowCache(
            "fleet_cell",
            ("id", "deployment_id", "region_id", "state", "generation", "model_version_id"),
            kept="state IN ('ready', 'draining')",
        )
        self._leaders = RowCache("fleet_cellmember", ("id", "cell_id", "node_id"), kept="rank = 0")
        self._nodes = RowCache("fleet_node", ("id", "address", "port_base"), kept="port_base IS NOT NULL")
        self._concurrency: dict[int, int] = {}
        self._routable: list[RoutableCell] = []
        self._tables: dict[str, KnownTable] = {}
        self.published: object = None

    def begin(self) -> None:
        """A pass begins; it may be time to look at everything. `end` must follow where nothing went wrong."""
        if self._looks.begin():
            self._forget()

    def end(self) -> None:
        """The pass came to its end."""
        self._looks.end()

    def tables(self) -> Mapping[str, KnownTable]:
        """Region -> its newest table. One that was published is never changed, so only new revisions are read."""
        newest = latest_revisions()
        missing = [
            Q(region_id=region, revision=revision)
            for region, revision in newest.items()
            if region not in self._tables or self._tables[region].revision != revision
        ]
        for table in RoutingTable.objects.filter(reduce(or_, missing)) if missing else ():
            self._tables[table.region_id] = _known(table)
        self._tables = {region: self._tables[region] for region in newest if region in self._tables}
        return self._tables

    def tables_in_force(self) -> dict[str, TableInForce]:
        """Region -> its newest table, as far as drains care. One that cannot be read may route every cell there."""
        return {
            region: TableInForce(
                table.revision,
                routed_cells(table.message)
                if table.message
                else frozenset(Cell.objects.filter(region=region).values_list("id", flat=True)),
            )
            for region, table in self.tables().items()
        }

    def routable_cells(self) -> list[RoutableCell]:
        """The same list as before where nothing has changed. A cell whose leader has no ports yet cannot be routed."""
        changed = [table.refresh() for table in (self._cells, self._leaders, self._nodes)]
        used = {row[4] for row in self._cells.rows.values()}
        concurrency = dict(ModelVersion.objects.filter(pk__in=used).values_list("pk", "max_concurrency"))
        if any(changed) or concurrency != self._concurrency:
            self._concurrency = concurrency
            self._routable = [self._cell(*leader) for leader in self._leaders.rows.values() if self._is_there(*leader)]
        return self._routable

    def _is_there(self, cell: str, node: str) -> bool:
        return cell in self._cells.rows and node in self._nodes.rows

    def _cell(self, cell: str, node: str) -> RoutableCell:
        deployment, region, state, generation, version = self._cells.rows[cell]
        address, port_base = self._nodes.rows[node]
        return RoutableCell(
            id=cell,
            deployment=deployment,
            region=region,
            state=state,
            generation=generation,
            node=node,
            address=address,
            port=port_base + PROXY,
            max_connections=self._concurrency[version],
        )


def _known(table: RoutingTable) -> KnownTable:
    try:
        return KnownTable(table.revision, table_message(table), table.body.get(KEY_RING, {}))
    except UnreadableTable as problem:
        return KnownTable(table.revision, None, {}, problem)
