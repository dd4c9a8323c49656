"""Control loops are Celery tasks of queues that housekeeping does not share. A wake-up follows the commit."""

from collections.abc import Callable

import pytest

from controlplane.celery import app
from kernel.control_loops import ControlLoop, control_loops, is_control_loop
from kernel.loop_passes import PASSES, control_standing

CONTROL = {
    *("fleet.reconcile", "fleet.provision", "fleet.agents", "fleet.cloud"),
    *("traffic.publish", "traffic.autopilot", "traffic.autoscale", "traffic.entry", "traffic.ensure_ingresses"),
    *("traffic.demand", "traffic.plan"),
}


def loop(make_pass: Callable[[], bool], called: str) -> ControlLoop:
    """One that no worker knows."""

    class OfThisTest(ControlLoop):
        name = called

        def run(self) -> bool:
            return make_pass()

    return OfThisTest()


def loops_recorded() -> set[str]:
    return {row.loop for row in control_standing().loops}


def test_the_loops_of_each_queue() -> None:
    assert set(control_loops(["control"])) == CONTROL
    assert not control_loops(["celery"])


def test_each_is_a_task_of_its_queue_that_is_acknowledged_late_and_never_expires() -> None:
    app.loader.import_default_modules()
    for name in CONTROL:
        task = app.tasks[name]
        assert isinstance(task, ControlLoop)
        assert is_control_loop(name)
        assert task.acks_late
        assert task.expires is None
        assert app.amqp.router.route({}, name)["queue"].name == "control"


def test_every_other_task_and_all_that_beat_asks_for_stay_out_of_their_queues() -> None:
    app.loader.import_default_modules()
    others = {name for name in app.tasks if not is_control_loop(name)} | {
        row["task"] for row in app.conf.beat_schedule.values()
    }
    assert others & {"kernel.heartbeat", "models_registry.validate"}
    assert {app.amqp.router.route({}, name)["queue"].name for name in others} == {app.conf.task_default_queue}


@pytest.mark.django_db
def test_a_whole_pass_is_recorded_and_one_that_another_process_makes_is_not() -> None:
    PASSES.write()  # passes of earlier tests
    before = loops_recorded()
    loop(lambda: True, "of.this_process")()
    loop(lambda: False, "of.another_process")()
    PASSES.write()
    assert loops_recorded() - before == {"of.this_process"}


@pytest.mark.django_db
def test_a_pass_that_fails_is_not_recorded() -> None:
    def fails() -> bool:
        raise RuntimeError("a bug")

    PASSES.write()
    before = loops_recorded()
    with pytest.raises(RuntimeError, match="a bug"):
        loop(fails, "of.a_bug")()
    PASSES.write()
    assert loops_recorded() == before
