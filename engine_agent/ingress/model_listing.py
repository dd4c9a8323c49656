"""What applications read of the models that an ingress serves, as entries of a map of HAProxy. Pure."""

import json
from operator import itemgetter

from engine_agent.protocol.ingress_messages import Pool, PoolAdapter, RoutingTable

LISTING_MAP = "listing.map"
"""`all` -> the body of GET /v1/models; `=MODEL` -> its entry there; `/MODEL` -> the backends of the pools that it leads
to, with blanks between."""
LISTING_ALL, LISTING_ONE = "all", "="


def listing_entries(table: RoutingTable, pools: tuple[Pool, ...]) -> dict[str, str]:
    """What applications read of each model. A name that several pools answer promises what all of them can do."""
    served: dict[str, tuple[Pool, ...]] = {model: (pool,) for pool in pools for model in pool.models}
    named = {pool.name: pool for pool in pools}
    for split in table.splits:
        used = [pool for pool, share in sorted(split.shares.items()) if share > 0]
        served[split.model] = tuple(named[pool] for pool in used if pool in named)
    listed = [_entry(model, pools) for model, pools in served.items()]
    listed += [_entry(adapter.name, (pool,), adapter) for pool in pools for adapter in pool.adapters]
    entries = {entry["id"]: json.dumps(entry, separators=(",", ":")) for entry in sorted(listed, key=itemgetter("id"))}
    return {
        LISTING_ALL: f'{{"object":"list","data":[{",".join(entries.values())}]}}',
        **{f"{LISTING_ONE}{model}": entry for model, entry in entries.items()},
    }


def _entry(model: str, pools: tuple[Pool, ...], adapter: PoolAdapter | None = None) -> dict[str, str | int]:
    lengths = [pool.max_model_len for pool in pools]
    return {
        "id": model,
        "object": "model",
        "created": max((pool.created_at for pool in pools), default=0),
        "owned_by": "switchyard",
        **({"parent": adapter.parent} if adapter else {}),
        **({"max_model_len": min(lengths)} if lengths and all(lengths) else {}),
    }
