"""Scenarios of faults: machines, engines and connections fail, or agents fall silent."""

from collections.abc import Iterator
from functools import partial

from fleet.faults.planning.views import Rung
from simulator.context import UNRULY
from simulator.fault_injection import device_breaks, network_cut, probe_fails, random_faults, scale, silence
from simulator.fleet_spec import DeploymentSpec, FleetSpec
from simulator.invariants import all_well, never_touched
from simulator.reconciler import ProcessFaults
from simulator.scenario import Scenario
from simulator.world import World


# Machines, agents, engines, connections and control plane processes fail at random. Every wanted cell must recover.
def _everywhere_play(world: World) -> None:
    random_faults(world, 12, 10.0, 600.0)
    world.queue.at(200.0, lambda: scale(world, "llama", "east", world.random.randint(2, 6)))
    world.queue.at(400.0, lambda: scale(world, "llama", "west", world.random.randint(0, 4)))


# A leader keeps answering 200 while its follower is dead. The follower's agent or its provider must reveal it.
BLIND_LEADER_NOTICED_WITHIN_S = 40.0


def _blind_leader_play(world: World) -> None:
    cells = sorted(world.store.cells.values(), key=lambda cell: cell.id)
    cell = world.random.choice(cells)
    leader, follower = (world.provider.machines[member.node] for member in cell.members)
    if leader.engine is not None:
        leader.engine.blind = True

    def die() -> None:
        world.context.note("fault", follower.node, f"the follower of {cell.id} dies, its leader sees nothing")
        if world.random.random() < 0.5 and follower.engine is not None:
            world.engines.end(follower.engine, "exit code 137: killed")
        else:
            follower.power_off(silently=True)

    world.queue.at(30.0, die)


def _blind_leader_expect(world: World) -> Iterator[str]:
    yield from all_well(world)
    broken = [entry for entry in world.timeline.entries if entry.kind in {"cell.failed", "cell.lost"}]
    if not broken:
        yield "the dead follower was not noticed"
    elif broken[0].at_s > 30.0 + BLIND_LEADER_NOTICED_WITHIN_S:
        yield f"it took {broken[0].at_s - 30.0:.0f} s to notice that a follower was dead"


# Every leader fails its probes once, for a few seconds. A single failed probe is not a fault: no action may follow.
PROBE_UNTIL_S = 300.0


def _probe_play(world: World) -> None:
    for cell in sorted(world.store.cells):
        at_s, for_s = world.random.uniform(20.0, 200.0), world.random.uniform(0.5, 6.0)
        world.queue.at(at_s, lambda cell=cell, for_s=for_s: probe_fails(world, cell, for_s))  # type: ignore[misc]


def _probe_expect(world: World) -> Iterator[str]:
    yield from all_well(world)
    kinds = ("cell.failed", "cell.lost", "cell.starting", "cell.draining", "node.suspect", "node.lost", "node.faulty")
    yield from never_touched(world, kinds)
    if world.timeline.counts["fault"] != len(world.store.cells):
        yield "not every cell had its bad moment"


# Nodes fall silent until they are suspect, and return while a stalled reconciler still holds its decisions. A decision
# about a node that returned must not be applied.
def _stale_play(world: World) -> None:
    for at_s in range(20, 600, 30):
        world.queue.at(at_s, lambda: network_cut(world, world.random.uniform(9.0, 28.0)))


def _stale_expect(world: World) -> Iterator[str]:
    yield from all_well(world)
    yield from never_touched(world, ("node.lost", "cell.lost"))


# Most of a zone falls silent while its provider reports it as running. Silence alone may replace nothing, and cells
# keep serving.
ZONE_SILENT_SHARE = 0.6


def _zone_play(world: World) -> None:
    zone = [machine for node, machine in sorted(world.provider.machines.items()) if world.region_of(node) == "east"]
    chosen = world.random.sample(zone, round(len(zone) * ZONE_SILENT_SHARE))
    world.queue.at(30.0, lambda: silence(world, chosen, 240.0))


def _zone_expect(world: World) -> Iterator[str]:
    yield from all_well(world)
    yield from never_touched(world, ("cell.lost", "cell.failed", "cell.draining", "node.lost"))
    if world.provider.launched:
        yield f"{world.provider.launched} machines were launched"


# Every agent falls silent at the same time: the control plane is disconnected. It may take no action, and cells keep
# serving.
ALL_SILENT_SILENT_S = 300.0


def _all_silent_play(world: World) -> None:
    world.queue.at(30.0, lambda: silence(world, world.provider.machines.values(), ALL_SILENT_SILENT_S))


def _all_silent_expect(world: World) -> Iterator[str]:
    yield from all_well(world)
    yield from never_touched(
        world, ("cell.failed", "cell.lost", "cell.starting", "cell.draining", "node.lost", "node.suspect")
    )
    if world.provider.launched:
        yield f"{world.provider.launched} machines were launched"


# Devices break one after the other, each so that another rung cures it. A repair costs a cell one restart, and only a
# device that nothing else cures costs its machine.
LADDER_EVERY_S = 300.0
LADDER = (
    ("nvidia_xid", "31", Rung.RESTART),
    ("nvidia_xid_fatal", "48", Rung.RESET),
    ("nvidia_xid_fatal", "79", Rung.REBOOT),
    ("nvidia_xid_fatal", "119", Rung.REPLACE),
)


def _ladder_play(world: World) -> None:
    for number, (signature, detail, cured_by) in enumerate(LADDER):
        at_s = 60.0 + number * LADDER_EVERY_S
        world.queue.at(at_s, partial(device_breaks, world, signature, detail, cured_by))


def _ladder_expect(world: World) -> Iterator[str]:
    yield from all_well(world)
    attempts = [attempt for mine in world.store.faults.attempts.values() for attempt in mine]
    found = [(attempt.rung, attempt.cured) for attempt in sorted(attempts, key=lambda one: one.at)]
    wanted = [(Rung.RESET, True), (Rung.REBOOT, True), (Rung.RESET, False), (Rung.REBOOT, False)]
    if found != wanted:
        yield f"the attempts were {found} instead of {wanted}"
    broken = [node for node, machine in world.provider.machines.items() if machine.cured_by is not None]
    if broken:
        yield f"{', '.join(broken)} are still there and broken"
    repaired = [node for node, mine in world.store.faults.attempts.items() if mine[-1].cured]
    if missing := [node for node in repaired if node not in world.store.nodes]:
        yield f"{', '.join(missing)} were cured and replaced anyway"


SCENARIOS = {
    "repair_ladder": Scenario(
        about="Four devices break: a restart, a reset, a reboot and only a replacement cures them.",
        fleet=FleetSpec((DeploymentSpec("llama", {"east": 4}),), devices=8, has_power_control=True),
        play=_ladder_play,
        until_s=60.0 + len(LADDER) * LADDER_EVERY_S,
        expect=_ladder_expect,
    ),
    "faults_everywhere": Scenario(
        about="Twelve random faults, lost and repeated messages, reconcilers killed between writes, and two scalings.",
        fleet=FleetSpec((DeploymentSpec("llama", {"east": 4, "west": 2}), DeploymentSpec("tiny", {"east": 3}, size=1))),
        play=_everywhere_play,
        until_s=1800.0,
        busy_s=800.0,
        expect=all_well,
        quality=UNRULY,
        process_faults=ProcessFaults(killed=0.02, stalled=0.02),
    ),
    "leader_200_follower_dead": Scenario(
        about="A blind leader: its /health stays 200 when its follower dies.",
        fleet=FleetSpec((DeploymentSpec("llama", {"east": 3}),)),
        play=_blind_leader_play,
        until_s=300.0,
        expect=_blind_leader_expect,
    ),
    "probe_fails_for_a_moment": Scenario(
        about="Each leader answers no probe for up to six seconds.",
        fleet=FleetSpec((DeploymentSpec("llama", {"east": 4, "west": 2}),)),
        play=_probe_play,
        until_s=PROBE_UNTIL_S,
        expect=_probe_expect,
    ),
    "stale_verdicts": Scenario(
        about="Nodes come and go, and every tenth pass writes 20 s late what it decided.",
        fleet=FleetSpec((DeploymentSpec("llama", {"east": 4, "west": 2}),)),
        play=_stale_play,
        until_s=900.0,
        expect=_stale_expect,
        quality=UNRULY,
        process_faults=ProcessFaults(stalled=0.1),
    ),
    "zone_silent": Scenario(
        about="60 % of the machines of a region are silent for four minutes.",
        fleet=FleetSpec((DeploymentSpec("llama", {"east": 10, "west": 3}),)),
        play=_zone_play,
        until_s=600.0,
        expect=_zone_expect,
    ),
    "all_silent": Scenario(
        about="All agents are silent for five minutes.",
        fleet=FleetSpec((DeploymentSpec("llama", {"east": 4, "west": 3}),)),
        play=_all_silent_play,
        until_s=600.0,
        expect=_all_silent_expect,
    ),
}
