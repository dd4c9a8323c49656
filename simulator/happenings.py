"""What can happen to a world, as scenarios say it: machines die, lines are cut, people scale and roll out."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from fleet.planning.policy import UpdatePolicy
from fleet.planning.snapshot import RolloutView, VersionView
from fleet.planning.states import CellState, RolloutState
from simulator.machine import Machine
from simulator.world import World


def scale(world: World, deployment: str, region: str, cells: int) -> None:
    """Somebody wants another number of cells."""
    spec = world.store.deployments[deployment]
    world.store.deployments[deployment] = replace(spec, cells_wanted={**spec.cells_wanted, region: cells})
    world.site.note("scale", deployment, f"{cells} cells wanted in {region}")
    world.control.ring()


def roll_out(world: World, deployment: str, to_version: str, policy: UpdatePolicy | None = None) -> None:
    """Somebody starts a rollout; an active one is superseded and its versions count as old."""
    store = world.store
    spec = store.deployments[deployment]
    store.deployments[deployment] = replace(
        spec, others={**spec.others, to_version: VersionView(spec.nodes_per_cell, spec.ready_timeout_s)}
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
    world.site.note("rollout.running", deployment, f"{spec.version} -> {to_version}")
    world.control.ring()


def any_machine(world: World, *, in_cell: bool | None = None) -> Machine | None:
    """One that has power, drawn at random; `in_cell` chooses among members or spares only."""
    machines = [
        machine
        for node, machine in sorted(world.machines.all.items())
        if machine.has_power and (in_cell is None or (node in world.store.member_of) is in_cell)
    ]
    return world.random.choice(machines) if machines else None


def machine_dies(world: World) -> None:
    """Any machine, at once or silently."""
    if machine := any_machine(world):
        world.site.note("fault", machine.node, "the machine loses power")
        machine.power_off(silently=world.random.random() < 0.5)


def agent_dies(world: World) -> None:
    if machine := any_machine(world):
        world.site.note("fault", machine.node, "its agent dies")
        machine.agent_dies()


def line_cut(world: World, for_s: float) -> None:
    """Any machine; the line comes back."""
    if machine := any_machine(world):
        silence(world, [machine], for_s)


def silence(world: World, machines: Iterable[Machine], for_s: float) -> None:
    """Nothing is heard of these machines for a while; they go on working."""
    chosen = list(machines)
    world.site.note("fault", "network", f"{len(chosen)} machines are silent for {for_s:.0f} s")
    for machine in chosen:
        machine.cut_line()
        world.queue.after(for_s, machine.mend_line)


def engine_crashes(world: World) -> None:
    """An engine of any cell ends by itself."""
    machine = any_machine(world, in_cell=True)
    if machine is not None and machine.engine is not None:
        world.site.note("fault", machine.node, "its engine crashes")
        world.engines.end(machine.engine, "exit code 134: abort")


def engine_hangs(world: World) -> None:
    """An engine lives and answers nothing."""
    machine = any_machine(world, in_cell=True)
    if machine is not None and machine.engine is not None:
        world.site.note("fault", machine.node, "its engine hangs")
        world.engines.hang(machine.engine)
        machine.news()


def probe_fails(world: World, cell: str, for_s: float) -> None:
    """The leader of a cell answers nothing for a moment."""
    leader = world.machines.all[world.store.cells[cell].members[0].node]
    engine = leader.engine
    if engine is None:
        return
    world.site.note("fault", cell, f"its leader answers no probe for {for_s:.1f} s")

    def answers_again() -> None:
        world.engines.answers_again(engine)
        leader.news()

    world.engines.hang(engine)
    leader.news()
    world.queue.after(for_s, answers_again)


def hub_restarts(world: World, for_s: float) -> None:
    """The process that agents talk to is away for a while."""
    world.site.note("fault", "hub", f"away for {for_s:.0f} s")
    world.hub.goes_down()
    world.queue.after(for_s, world.hub.comes_up)


FAULTS = (machine_dies, agent_dies, engine_crashes, engine_hangs)


def random_faults(world: World, count: int, from_s: float, to_s: float) -> None:
    """So many faults of any kind at random moments."""
    for _ in range(count):
        at_s = world.random.uniform(from_s, to_s)
        pick = world.random.random()
        if pick < 0.2:
            world.queue.at(at_s, lambda: line_cut(world, world.random.uniform(3.0, 60.0)))
        elif pick < 0.25:
            world.queue.at(at_s, lambda: hub_restarts(world, world.random.uniform(1.0, 20.0)))
        else:
            fault = world.random.choice(FAULTS)
            world.queue.at(at_s, lambda fault=fault: fault(world))  # type: ignore[misc]


def not_all_ready(world: World) -> Iterator[str]:
    """Places that lack cells, or have too many."""
    for name, spec in world.store.deployments.items():
        for region, wanted in spec.cells_wanted.items():
            cells = [c for c in world.store.cells.values() if (c.deployment, c.region) == (name, region)]
            ready = [cell for cell in cells if cell.state is CellState.READY]
            if len(ready) != wanted or len(cells) != wanted:
                states = ", ".join(f"{cell.id} {cell.state}: {cell.reason}" for cell in cells if cell not in ready)
                yield f"{name} in {region}: {len(ready)} of {wanted} cells are ready; {states or 'none other is there'}"


def not_serving(world: World) -> Iterator[str]:
    """Cells that are called ready and would not answer."""
    for cell in world.store.cells.values():
        if cell.state is CellState.READY and not world.engines.ready(cell.id, cell.generation):
            yield f"{cell.id} is called ready and does not answer"


def all_well(world: World) -> Iterator[str]:
    """What a fleet that healed must be."""
    yield from not_all_ready(world)
    yield from not_serving(world)


def never_touched(world: World, kinds: Iterable[str]) -> Iterator[str]:
    """Things that were written down and must not have happened."""
    for kind in kinds:
        if count := world.journal.counts[kind]:
            example = next(entry for entry in world.journal.entries if entry.kind == kind)
            yield f"{kind} happened {count} times, first at {example.at_s:.1f} s: {example.subject}: {example.text}"


def mixed_versions(world: World) -> Iterator[str]:
    """Deployments whose cells run several versions, or another than their own."""
    for name, spec in world.store.deployments.items():
        versions = {cell.version for cell in world.store.cells.values() if cell.deployment == name}
        if name not in world.store.rollouts and versions - {spec.version}:
            yield f"{name} should serve {spec.version}; its cells run {', '.join(sorted(versions))}"


def resume_paused(world: World, every_s: float) -> None:
    """Somebody looks now and then, and resumes a rollout that paused."""

    def look() -> None:
        for name, rollout in list(world.store.rollouts.items()):
            if rollout.state is RolloutState.PAUSED:
                world.site.note("rollout.resumed", name, f"somebody resumes it: {rollout.reason}")
                world.store.rollouts[name] = replace(
                    rollout,
                    state=RolloutState.RUNNING,
                    revision=rollout.revision + 1,
                    state_since=world.queue.now,
                    failed=(),
                    reason="resumed",
                )
                world.control.ring()
        world.queue.after(every_s, look)

    world.queue.after(every_s, look)


def touched_cells(world: World) -> set[str]:
    """Cells that were taken down or broke at any time."""
    kinds = {"cell.draining", "cell.failed", "cell.lost"}
    return {entry.subject for entry in world.journal.entries if entry.kind in kinds}
