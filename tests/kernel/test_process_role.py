"""A process knows from its command line which one it is."""

import pytest

from kernel.process_role import ProcessRole, process_role


@pytest.mark.parametrize(
    ("arguments", "role"),
    [
        ("celery -A controlplane worker --queues control", ProcessRole.CONTROLLER),
        ("celery -A controlplane worker -Q control -E", ProcessRole.CONTROLLER),
        ("celery -A controlplane worker --queues=control --quiet", ProcessRole.CONTROLLER),
        ("celery -A controlplane worker -Qcontrol", ProcessRole.CONTROLLER),
        ("celery -A controlplane worker -Q other,control", ProcessRole.CONTROLLER),
        ("celery -A controlplane worker --concurrency 2", ProcessRole.WORKER),
        ("celery -A controlplane worker -Q celery", ProcessRole.WORKER),
        ("celery -A controlplane beat", ProcessRole.COMMAND),
        ("celery -A controlplane inspect active_queues", ProcessRole.COMMAND),
        ("manage.py jobs", ProcessRole.JOBS),
        ("manage.py migrate", ProcessRole.COMMAND),
        ("/checkout/controlplane/web.py --port 8000", ProcessRole.WEB),
        ("", ProcessRole.COMMAND),
    ],
)
def test_the_role_of_a_command_line(arguments: str, role: ProcessRole) -> None:
    assert process_role(arguments.split()) is role
