"""What scenarios do to a world: faults of machines, engines, connections and processes, and actions of operators."""

from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from functools import partial

from fleet.deployments.planner import UpdatePolicy
from fleet.faults.planning.views import NoticeView, Rung, SignalView
from fleet.reconcile.planning.snapshot import RolloutView, VersionView
from fleet.reconcile.planning.states import NoticeKind, RolloutState
from simulator.machine import Machine
from simulator.world import World

REGION_BOOTS_S = 120.0
"""After the loss of a region its machines boot within this time."""


def any_machine(world: World, *, in_cell: bool | None = None) -> Machine | None:
    machines = [
        machine
        for node, machine in sorted(world.provider.machines.items())
        if machine.has_power and (in_cell is None or (node in world.store.member_of) is in_cell)
    ]
    return world.random.choice(machines) if machines else None


def machine_dies(world: World) -> None:
    """A random machine fails, with a closed connection or silently."""
    if machine := any_machine(world):
        world.context.note("fault", machine.node, "the machine loses power")
        machine.power_off(silently=world.random.random() < 0.5)


def agent_dies(world: World) -> None:
    if machine := any_machine(world):
        world.context.note("fault", machine.node, "its agent dies")
        machine.agent_dies()


def network_cut(world: World, for_s: float) -> None:
    if machine := any_machine(world):
        silence(world, [machine], for_s)


def silence(world: World, machines: Iterable[Machine], for_s: float) -> None:
    """Drops all messages of these machines for a while; they keep working."""
    chosen = list(machines)
    world.context.note("fault", "network", f"{len(chosen)} machines are silent for {for_s:.0f} s")
    for machine in chosen:
        machine.cut_network()
        world.queue.after(for_s, machine.restore_network)


def lose_region(world: World, region: str, for_s: float) -> None:
    """All machines of a region lose power for a while. Its provider reports nothing about them and launches none; then
    they boot again, without their engines."""
    lost = [machine for node, machine in sorted(world.provider.machines.items()) if world.region_of(node) == region]
    world.context.note("fault", region, f"the region is lost with {len(lost)} machines for {for_s:.0f} s")
    world.provider.dark.add(region)
    world.provider.sold_out.add(region)
    for machine in lost:
        machine.power_off(silently=True)

    def recover() -> None:
        world.context.note("region.back", region, "its machines have power again")
        world.provider.sold_out.discard(region)
        for node, machine in sorted(world.provider.machines.items()):
            if world.region_of(node) == region and not machine.has_power:
                world.queue.after(world.random.uniform(0.0, REGION_BOOTS_S), partial(world.provider.power_on, node))
        world.queue.after(REGION_BOOTS_S, lambda: world.provider.dark.discard(region))

    world.queue.after(for_s, recover)


def announce(world: World, nodes: Iterable[str], kind: NoticeKind, lead_s: float) -> None:
    """The provider announces the end of these machines, and terminates them then unless they were returned before."""
    for node in nodes:
        ends_at = world.queue.now + timedelta(seconds=lead_s)
        notice = NoticeView(node, kind, world.queue.now, ends_at)
        world.store.notices = (*world.store.notices, notice)
        world.context.note("notice", node, f"{kind} in {lead_s:.0f} s")
        machine = world.provider.machines[node]
        world.queue.after(lead_s, lambda machine=machine: machine.power_off(silently=False))  # type: ignore[misc]
    world.reconciler.wake()


def engine_crashes(world: World) -> None:
    machine = any_machine(world, in_cell=True)
    if machine is not None and machine.engine is not None:
        world.context.note("fault", machine.node, "its engine crashes")
        world.engines.end(machine.engine, "exit code 134: abort")


def device_breaks(world: World, signature: str, detail: str, cured_by: Rung) -> None:
    """A device of a random machine of a cell breaks, and its engine exits. Its agent reports the signature."""
    machine = any_machine(world, in_cell=True)
    if machine is None:
        return
    world.context.note("fault", machine.node, f"{signature} {detail}, cured by {cured_by}")
    if cured_by is not Rung.RESTART:
        machine.cured_by = cured_by
    now = world.queue.now
    kind = world.store.nodes[machine.node].instance_type
    broken = SignalView(machine.node, signature, f"{signature} {detail}", kind, now, now, detail=detail)
    world.store.faults = replace(world.store.faults, signals=(*world.store.faults.signals, broken))
    if machine.engine is not None:
        world.engines.end(machine.engine, "exit code 134: the device failed")
    world.reconciler.wake()


def engine_hangs(world: World) -> None:
    """A random engine keeps running and answers nothing."""
    machine = any_machine(world, in_cell=True)
    if machine is not None and machine.engine is not None:
        world.context.note("fault", machine.node, "its engine hangs")
        world.engines.hang(machine.engine)
        machine.engine_changed()


def probe_fails(world: World, cell: str, for_s: float) -> None:
    """The leader of a cell answers nothing for a moment."""
    leader = world.provider.machines[world.store.cells[cell].members[0].node]
    engine = leader.engine
    if engine is None:
        return
    world.context.note("fault", cell, f"its leader answers no probe for {for_s:.1f} s")

    def answers_again() -> None:
        world.engines.unhang(engine)
        leader.engine_changed()

    world.engines.hang(engine)
    leader.engine_changed()
    world.queue.after(for_s, answers_again)


def agent_server_restarts(world: World, for_s: float) -> None:
    """The process that agents connect to is down for a while."""
    world.context.note("fault", "hub", f"away for {for_s:.0f} s")
    world.agent_server.crash()
    world.queue.after(for_s, world.agent_server.recover)


FAULTS = (machine_dies, agent_dies, engine_crashes, engine_hangs)


def random_faults(world: World, count: int, from_s: float, to_s: float) -> None:
    """Schedules so many faults of random kinds at random times."""
    for _ in range(count):
        at_s = world.random.uniform(from_s, to_s)
        pick = world.random.random()
        if pick < 0.2:
            world.queue.at(at_s, lambda: network_cut(world, world.random.uniform(3.0, 60.0)))
        elif pick < 0.25:
            world.queue.at(at_s, lambda: agent_server_restarts(world, world.random.uniform(1.0, 20.0)))
        else:
            fault = world.random.choice(FAULTS)
            world.queue.at(at_s, lambda fault=fault: fault(world))  # type: ignore[misc]


def scale(world: World, deployment: str, region: str, cells: int) -> None:
    spec = world.store.deployments[deployment]
    world.store.deployments[deployment] = spec.scaled(region, cells)
    world.context.note("scale", deployment, f"{cells} cells wanted in {region}")
    world.reconciler.wake()


def roll_out(world: World, deployment: str, to_version: str, policy: UpdatePolicy | None = None) -> None:
    """Starts a rollout; an active one is superseded and its versions count as old."""
    store = world.store
    spec = store.deployments[deployment]
    store.deployments[deployment] = replace(
        spec,
        others={**spec.others, to_version: VersionView(spec.nodes_per_cell, spec.ready_timeout_s)},
        further={kind: {**views, to_version: views[spec.version]} for kind, views in spec.further.items()},
    )
    store.rollouts = {key: rollout for key, rollout in store.rollouts.items() if rollout.deployment != deployment}
    store.rollouts_begun += 1
    store.rollouts[deployment] = RolloutView(
        id=store.rollouts_begun,
        deployment=deployment,
        from_version=spec.version,
        to_version=to_version,
        state=RolloutState.RUNNING,
        stage=0,
        region_order=tuple(sorted(spec.cells_wanted)),
        policy=policy or spec.policy,
        revision=1,
        state_since=world.queue.now,
        reason="asked for",
    )
    world.context.note("rollout.running", deployment, f"{spec.version} -> {to_version}")
    world.reconciler.wake()


def resume_paused(world: World, every_s: float) -> None:
    def resume() -> None:
        for name, rollout in list(world.store.rollouts.items()):
            if rollout.state is RolloutState.PAUSED:
                world.context.note("rollout.resumed", name, f"an operator resumes it: {rollout.reason}")
                world.store.rollouts[name] = replace(
                    rollout,
                    state=RolloutState.RUNNING,
                    revision=rollout.revision + 1,
                    state_since=world.queue.now,
                    failed=(),
                    reason="resumed",
                )
                world.reconciler.wake()
        world.queue.after(every_s, resume)

    world.queue.after(every_s, resume)
