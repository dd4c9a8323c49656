"""What operators do in a scenario: scale, start rollouts, resume paused ones."""

from dataclasses import replace

from fleet.planning.policy import UpdatePolicy
from fleet.planning.snapshot import RolloutView, VersionView
from fleet.planning.states import RolloutState
from simulator.world import World


def scale(world: World, deployment: str, region: str, cells: int) -> None:
    spec = world.store.deployments[deployment]
    world.store.deployments[deployment] = spec.scaled(region, cells)
    world.context.note("scale", deployment, f"{cells} cells wanted in {region}")
    world.reconciler.wake()


def roll_out(world: World, deployment: str, to_version: str, policy: UpdatePolicy | None = None) -> None:
    """Start a rollout; an active one is superseded and its versions count as old."""
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
    """Resume, every so often, a rollout that is paused."""

    def resume() -> None:
        for name, rollout in list(world.store.rollouts.items()):
            if rollout.state is RolloutState.PAUSED:
                world.context.note("rollout.resumed", name, f"somebody resumes it: {rollout.reason}")
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
