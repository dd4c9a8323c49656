"""Celery tasks of the fleet: control loops and housekeeping."""

from functools import partial

from celery import shared_task

from fleet.agents.services.authority import authority_advance, certificates_trim
from fleet.agents.services.enrolment import join_tokens_trim
from fleet.clouds.services.upkeep import CloudUpkeep, cloud_metrics_send
from fleet.faults.services.incidents import step_windows_cut
from fleet.faults.services.watch import speculation_drift_check, token_drift_check
from fleet.load.services import history_trim, load_sample, node_windows_sample
from fleet.machines.services.machines import invitations_trim
from fleet.machines.services.provisioning import Provisioning
from fleet.nodes.services.reports import node_logs_trim
from fleet.reconcile.selectors.cache import FleetCache
from fleet.reconcile.services import reconcile_alone
from fleet.recorder.services import Recorder, rounds_trim
from fleet.regions.services import application_certificates_check
from fleet.releases.services.releases import AgentRollouts
from fleet.requests.services import request_samples_trim
from fleet.rollouts.services import rollout_points_keep
from fleet.webhooks.services import deliveries_trim
from kernel import clock
from kernel.control_loops import ControlLoop, rest_loop

RECONCILE_FOR_S = 0.75
"""Then the next pass looks again."""

_fleet = FleetCache()
_recorder = Recorder()


@shared_task(name="fleet.reconcile", base=ControlLoop)
def reconcile_fleet() -> bool:
    """A pass of the control loop; False: another controller is at it."""
    rest = partial(rest_loop, reconcile_fleet.name)
    return reconcile_alone(cache=_fleet, limit_s=RECONCILE_FOR_S, recorder=_recorder, rest=rest) is not None


_provisioning = Provisioning()


@shared_task(name="fleet.provision", base=ControlLoop)
def provision() -> bool:
    """Runs a pass of the control loop. Several controllers may run it concurrently; each takes different orders."""
    return _provisioning.run_pass(rest=partial(rest_loop, provision.name))


_upkeep = CloudUpkeep()


@shared_task(name="fleet.cloud", base=ControlLoop)
def keep_clouds() -> bool:
    """Runs a pass of the control loop. Several controllers may run it concurrently; each takes different regions."""
    return _upkeep.run_pass(rest=partial(rest_loop, keep_clouds.name))


_agents = AgentRollouts()


@shared_task(name="fleet.agents", base=ControlLoop)
def roll_agents() -> bool:
    """A pass of the control loop; False: another controller is at it."""
    return _agents.run_pass(rest=partial(rest_loop, roll_agents.name))


@shared_task(name="fleet.step_windows")
def step_windows() -> None:
    step_windows_cut(now=clock.now())


@shared_task(name="fleet.send_cloud_metrics")
def send_cloud_metrics() -> None:
    cloud_metrics_send(now=clock.now())


@shared_task(name="fleet.trim_deliveries")
def trim_deliveries() -> None:
    deliveries_trim(now=clock.now())


@shared_task(name="fleet.trim_join_tokens")
def trim_join_tokens() -> None:
    join_tokens_trim(now=clock.now())
    invitations_trim(now=clock.now())


@shared_task(name="fleet.advance_authorities")
def advance_authorities() -> None:
    authority_advance(now=clock.now())


@shared_task(name="fleet.trim_certificates")
def trim_certificates() -> None:
    certificates_trim(now=clock.now())


@shared_task(name="fleet.judge_certificates")
def judge_certificates() -> None:
    application_certificates_check(now=clock.now())


@shared_task(name="fleet.sample_load")
def sample_load() -> None:
    now = clock.now()
    if load_sample(now=now):
        rollout_points_keep(now=now)
    node_windows_sample(now=now)


@shared_task(name="fleet.judge_token_drift")
def judge_token_drift() -> None:
    token_drift_check(now=clock.now())


@shared_task(name="fleet.judge_speculation_drift")
def judge_speculation_drift() -> None:
    speculation_drift_check(now=clock.now())


@shared_task(name="fleet.trim_history")
def trim_history() -> None:
    history_trim(now=clock.now())
    node_logs_trim(now=clock.now())
    request_samples_trim(now=clock.now())
    rounds_trim(now=clock.now())
