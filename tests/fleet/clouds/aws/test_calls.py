"""Calls to AWS: which are allowed, what answers mean, what is cut from them, and when boto3 is imported."""

import subprocess
import sys

import pytest
from django.db import transaction

from fleet.clouds.aws import calls
from lab.cloud.world import Ending, Fault, When
from tests.fleet.clouds.aws.cloud_fleet import REGION, CloudFleet

pytestmark = pytest.mark.cloud


def test_what_is_not_in_the_table_is_not_called() -> None:
    with pytest.raises(ValueError, match="ec2 StopInstances is not in the table"):
        calls.send("ec2", "StopInstances", REGION, {})


def test_nothing_is_called_inside_of_a_transaction(cloud_fleet: CloudFleet) -> None:
    calls.call("ec2", "DescribeInstances", REGION)
    inside = "ec2 DescribeInstances inside of a transaction: make it before or after"
    with transaction.atomic(), pytest.raises(RuntimeError, match=inside):
        calls.call("ec2", "DescribeInstances", REGION)
    assert cloud_fleet.world.count("DescribeInstances") == 1


def test_a_list_without_an_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def page(*_: object, **params: object) -> dict[str, str]:
        asked.append(params)
        return {"NextToken": "again"}

    monkeypatch.setattr(calls, "call", page)
    with pytest.raises(calls.Unanswered, match="DescribeInstances has more than 2000 pages"):
        for _ in calls.pages("DescribeInstances", REGION):
            pass
    assert len(asked) == calls.PAGES_MOST


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (Fault("DescribeInstances", "UnauthorizedOperation"), calls.Refused),
        (Fault("DescribeInstances", "InternalError"), calls.Unanswered),
        (Fault("DescribeInstances", when=When.AFTER, ending=Ending.RESET), calls.Unanswered),
        (Fault("DescribeInstances", when=When.AFTER, ending=Ending.CUT), calls.Unanswered),
    ],
    ids=["refused", "500", "reset", "cut"],
)
def test_what_failed_was_refused_or_was_not_answered(
    cloud_fleet: CloudFleet, fault: Fault, kind: type[Exception]
) -> None:
    cloud_fleet.world.faults.append(fault)
    with pytest.raises(kind):
        calls.call("ec2", "DescribeInstances", REGION)


def test_parameters_that_ec2_does_not_have_are_refused_without_a_call(cloud_fleet: CloudFleet) -> None:
    with pytest.raises(calls.Refused, match="Unknown parameter"):
        calls.call("ec2", "DescribeInstances", REGION, Nonsense=1)
    assert not cloud_fleet.world.count("DescribeInstances")


def test_our_own_share_of_calls_is_kept_by_all_processes(cloud_fleet: CloudFleet) -> None:
    calls.call("ec2", "DescribeInstanceTopology", REGION, InstanceIds=[])
    with pytest.raises(calls.Refused, match="the own call budget") as refused:
        calls.call("ec2", "DescribeInstanceTopology", REGION, InstanceIds=[])
    assert refused.value.not_before is not None
    assert cloud_fleet.world.count("DescribeInstanceTopology") == 1


def test_network_interfaces_are_cut_before_they_are_parsed() -> None:
    text = b"<a><i>1</i><networkInterfaceSet><x/></networkInterfaceSet><ip>10.0.0.4</ip><networkInterfaceSet/></a>"
    answer = {"body": text * 2}
    calls.cut_interfaces(answer)
    assert answer["body"] == b"<a><i>1</i><ip>10.0.0.4</ip><networkInterfaceSet/></a>" * 2


def test_nothing_of_the_control_plane_imports_boto3_before_it_calls_aws() -> None:
    program = (
        "import os, sys; os.environ['DJANGO_SETTINGS_MODULE'] = 'controlplane.settings';"
        "os.environ['SWITCHYARD_SECRET_KEY'] = 'k' * 60;"
        "import controlplane.celery, django; django.setup(); import controlplane.urls, fleet.tasks, traffic.tasks;"
        "from fleet.clouds.base import provider_named; provider_named('aws');"
        "sys.exit(str(sorted({name.split('.')[0] for name in sys.modules} & {'boto3', 'botocore'})))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.stderr.strip().splitlines()[-1:] == ["[]"]
