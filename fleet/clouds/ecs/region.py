"""Reads the outputs of a cluster's stack (`deploy/aws/ecs.yaml`). Changes nothing. Errors name the stack and the
missing output, so that an operator knows what to update."""

from fleet.clouds.aws.calls import call
from fleet.clouds.aws.region import TARGET_OUTPUTS, Call, RegionRead, StackRefused, stack_outputs
from fleet.clouds.planning.upkeep import CloudBase, ClusterBase, ZoneBase

NEEDED = (
    "Install", "Cluster", "NodeTaskRole", "IngressTaskRole", "ExecutionRole", "NodeImage", "IngressImage", "LogGroup",
    "ArtifactBucket", "NoticeQueue", "DeadNoticeQueue",
)  # fmt: skip
TEMPLATE = "deploy/aws/ecs.yaml"


def cluster_read(region: str, stack: str, install: str, send: Call = call) -> RegionRead:
    """Reads a stack. `region` as AWS names it. Its machines are container instances, so that it has no pools; its zones
    are those of its ingresses, by name because a container instance states no ID of a zone. Raises
    StackRefused if the stack does not exist, is being changed, belongs to another install, or lacks an output. Raises
    fleet.clouds.aws.calls.CallFailed if AWS did not answer or denied the call."""
    outputs, account = stack_outputs(region, stack, install, send, NEEDED, TEMPLATE)
    for name in ("NodeTaskRole", "IngressTaskRole"):
        if f":{account}:role/" not in outputs[name]:
            raise StackRefused(f"{name} of stack {stack} is {outputs[name]}, which is no role of account {account}")
    zones = [name for name in outputs.get("IngressZones", "").split(",") if name]
    base = CloudBase(
        account=account,
        zones={name: ZoneBase("", name) for name in zones},
        node_group="",
        node_profile="",
        node_role=_role_name(outputs["NodeTaskRole"]),
        ingress_role=_role_name(outputs["IngressTaskRole"]),
        bucket=outputs["ArtifactBucket"],
        queue_url=outputs["NoticeQueue"],
        dead_letter_url=outputs["DeadNoticeQueue"],
        target_groups={name: outputs[output] for name, output in TARGET_OUTPUTS.items() if outputs.get(output)},
        load_balancer=outputs.get("EntryAddress", ""),
        load_balancer_zone=outputs.get("EntryZone", ""),
        hosted_zone=outputs.get("HostedZoneId", ""),
        entry_name=outputs.get("EntryName", ""),
        cluster=ClusterBase(
            name=outputs["Cluster"],
            task_role=outputs["NodeTaskRole"],
            ingress_role=outputs["IngressTaskRole"],
            execution_role=outputs["ExecutionRole"],
            image=outputs["NodeImage"],
            ingress_image=outputs["IngressImage"],
            log_group=outputs["LogGroup"],
        ),
    )
    return RegionRead(base, ())


def _role_name(arn: str) -> str:
    return arn.rpartition("/")[2]
