"""Decides which ingresses a load balancer sends connections to. Pure.

An ingress is registered once it reports a table, and taken out before it drains. One that falls silent stays: the load
balancer's own checks know better. Addresses are used again, so a target is known by its ingress, too.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TargetIngress:
    """`ready`: it runs a table. `leaving`: it is to take nothing new."""

    id: str
    address: str
    port: int
    ready: bool = False
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class Target:
    """What was registered for an ingress, in one group. `draining`: it was taken out, and may still have streams."""

    ingress: str
    group: str
    address: str
    port: int
    draining: bool = False


@dataclass(frozen=True, slots=True)
class TargetPlan:
    """`forget`: targets whose address is another ingress's by now, so that nothing is to be said about them."""

    register: tuple[Target, ...] = ()
    deregister: tuple[Target, ...] = ()
    forget: tuple[Target, ...] = ()


def plan_targets(groups: Collection[str], ingresses: Sequence[TargetIngress], targets: Sequence[Target]) -> TargetPlan:
    """What to say to the load balancer. The last target of a group that serves stays until another one does, unless its
    ingress is no more."""
    there = {(each.ingress, each.group): each for each in targets}
    by_id = {each.id: each for each in ingresses}
    register = tuple(
        Target(each.id, group, each.address, each.port)
        for group in sorted(groups)
        for each in ingresses
        if each.ready and not each.leaving and each.address and not _is_registered(there.get((each.id, group)), each)
    )
    claimed = {(each.group, each.address, each.port) for each in register} | {
        (each.group, each.address, each.port)
        for each in targets
        if not each.draining and _is_wanted(by_id.get(each.ingress), each)
    }
    deregister, forget = [], []
    for target in targets:
        ingress = by_id.get(target.ingress)
        if target.draining or _is_wanted(ingress, target):
            continue
        if (target.group, target.address, target.port) in claimed:
            forget.append(target)
        elif ingress is None or ingress.address != target.address or any(g == target.group for g, _, _ in claimed):
            deregister.append(target)
    return TargetPlan(register, tuple(deregister), tuple(forget))


def _is_registered(target: Target | None, ingress: TargetIngress) -> bool:
    """Also while it still drains under another address: first that one ends."""
    if target is None:
        return False
    return not target.draining or (target.address, target.port) != (ingress.address, ingress.port)


def _is_wanted(ingress: TargetIngress | None, target: Target) -> bool:
    if ingress is None or ingress.leaving:
        return False
    return (ingress.address, ingress.port) == (target.address, target.port)
