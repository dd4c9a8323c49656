"""Says in one sentence how two routing tables differ, for events and history. Pure."""

from engine_agent.protocol.messages import Pool, Split


def describe_change(before: tuple[Pool, ...], after: tuple[Pool, ...]) -> str:
    """One sentence; never empty."""
    parts: list[str] = []
    old, new = {pool.name: pool for pool in before}, {pool.name: pool for pool in after}
    for name in sorted(old.keys() | new.keys()):
        parts += _pool_changes(name, old.get(name), new.get(name))
    return "; ".join(parts) or "addresses changed"


def describe_splits(before: tuple[Split, ...], after: tuple[Split, ...]) -> list[str]:
    """What changed about the names that several deployments answer."""
    old, new = {split.model: split for split in before}, {split.model: split for split in after}
    parts = []
    for model in sorted(old.keys() | new.keys()):
        if model not in new:
            parts.append(f"model {model} is no longer split")
        elif old.get(model) != new[model]:
            total = sum(new[model].shares.values())
            shares = ", ".join(f"{pool} {weight / total:.1%}" for pool, weight in new[model].shares.items())
            parts.append(f"model {model}: {shares}{'' if new[model].sticky else ', each request anew'}")
    return parts


def _pool_changes(name: str, old: Pool | None, new: Pool | None) -> list[str]:
    if new is None:
        return [f"{name} is no longer served"]
    was = {cell.cell: cell for cell in old.cells} if old else {}
    now = {cell.cell: cell for cell in new.cells}
    parts = [f"+{cell}" for cell in now if cell not in was and not now[cell].drain]
    parts += [f"-{cell}" for cell in was if cell not in now]
    parts += [f"{cell} drains" for cell in now if now[cell].drain and not (cell in was and was[cell].drain)]
    parts += [f"{cell} restarted" for cell in now if cell in was and now[cell].generation != was[cell].generation]
    if old is None or old.fractions != new.fractions:
        shares = ", ".join(f"{region} {share:.0%}" for region, share in new.fractions.items()) or "nobody can serve"
        parts.append(f"{name} -> {shares}")
    if (old.affinity if old else None) != new.affinity:
        parts.append(f"{name} {'keeps prefixes together' if new.affinity else 'goes by fewest requests alone'}")
    return parts
