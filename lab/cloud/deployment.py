"""Deploys `deploy/aws/*.yaml` to the cloud of tests, as a person deploys them to AWS."""

from pathlib import Path

from lab.cloud.images import publish_images
from lab.cloud.world import World

TEMPLATES = Path(__file__).parents[2] / "deploy" / "aws"
HOME = "us-east-1"


def deploy(world: World, region: str, stack: str, template: str, parameters: dict[str, str]) -> dict[str, str]:
    """A template of `deploy/aws`; the outputs of its stack.

    Raises:
        RuntimeError: it is not complete.
    """
    client = world.client("cloudformation", region)
    given = [{"ParameterKey": key, "ParameterValue": value} for key, value in parameters.items()]
    body = (TEMPLATES / template).read_text()
    client.create_stack(
        StackName=stack, TemplateBody=body, Parameters=given, Capabilities=["CAPABILITY_NAMED_IAM"]
    )  # fmt: skip
    made = client.describe_stacks(StackName=stack)["Stacks"][0]
    if made["StackStatus"] != "CREATE_COMPLETE":
        raise RuntimeError(f"{stack} is {made['StackStatus']}: {made.get('StackStatusReason')}")
    return {each["OutputKey"]: each["OutputValue"] for each in made["Outputs"]}


def deploy_base(world: World, install: str, **parameters: str) -> dict[str, str]:
    return deploy(world, HOME, "switchyard-base", "base.yaml", {"Install": install, **parameters})


def deploy_region(world: World, region: str, base: dict[str, str], **parameters: str) -> dict[str, str]:
    """As stack `switchyard-REGION`, over its zones a and b unless `parameters` say more."""
    publish_images(world, region)
    passed_on = {key: base[key] for key in ("Install", "NodeProfile", "IngressProfile", "ArtifactBucket", "BaseRegion")}
    optional = {key: base[key] for key in ("HostedZoneId",) if key in base}
    stated = {"ZoneA": f"{region}a", "ZoneB": f"{region}b", **passed_on, **optional, **parameters}
    return deploy(world, region, f"switchyard-{region}", "region.yaml", stated)
