"""Launch requests are valid in EC2's model and match their golden files. The boot script is small, has no secret, runs
the join script, retries, and shuts down machines that never join."""

import subprocess
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from botocore.validate import ParamValidator
from hypothesis import given
from hypothesis import strategies as st

from fleet.capacity.planning.pools import Market, PoolView, UnitView
from fleet.clouds.aws.launch import BYTES_MOST, TAGS, Request, instance_networks, run_instances, user_data
from fleet.clouds.planning.launches import AttemptView
from tests.fleet.capacity.test_pools_planner import pool
from tests.fleet.clouds.aws.requests import BASE, BEGUN, BOOT, GOLDEN, TYPES, golden_requests, launch, sold, written

ALL = [(name, market) for name in sorted(instance_networks()) for market in Market if sold(name, market)]


@cache
def input_shape() -> Any:
    return botocore.session.get_session().get_service_model("ec2").operation_model("RunInstances").input_shape


def wrong_words(shape: Any, value: Any) -> list[str]:
    """Values outside EC2's enumerations, which botocore's validators do not check."""
    if shape.type_name == "structure":
        return [word for name, one in value.items() for word in wrong_words(shape.members[name], one)]
    if shape.type_name == "list":
        return [word for one in value for word in wrong_words(shape.member, one)]
    known = shape.metadata.get("enum") or [value]
    return [] if value in known else [value]


def test_every_request_for_every_type_and_market_is_one_of_ec2s() -> None:
    validator = ParamValidator()
    for name, market in ALL:
        for group in ("", "switchyard-use1-az4"):
            request = launch(name, market, placement_group=group)
            report = validator.validate(request, input_shape())
            assert not report.has_errors(), f"{name} {market}: {report.generate_report()}"
            assert not wrong_words(input_shape(), request), (name, market)


def test_golden_files_are_those_of_today() -> None:
    files = {file.stem: file.read_text() for file in GOLDEN.glob("*.json")}
    expected = {name: written(request) for name, request in golden_requests().items()}
    assert files == expected, "run python -m tests.fleet.clouds.aws.requests, and read the difference"


@pytest.mark.parametrize("market", Market)
def test_all_or_none_with_nothing_left_behind_and_no_address_in_public(market: Market) -> None:
    request = launch("trn1.32xlarge", market, count=4)
    assert request["MinCount"] == request["MaxCount"] == 4
    assert request["InstanceInitiatedShutdownBehavior"] == "terminate"
    assert request["MetadataOptions"]["HttpTokens"] == "required"
    assert request["MetadataOptions"]["HttpPutResponseHopLimit"] == 1
    assert not {"SubnetId", "SecurityGroupIds", "KeyName"} & set(request)
    for one in request["NetworkInterfaces"]:
        assert one["DeleteOnTermination"]
        assert "AssociatePublicIpAddress" not in one
    assert len({one["SubnetId"] for one in request["NetworkInterfaces"]}) == 1
    assert all(one["Ebs"]["DeleteOnTermination"] and one["Ebs"]["Encrypted"] for one in request["BlockDeviceMappings"])


@pytest.mark.parametrize("market", Market)
def test_what_is_launched_is_tagged_and_requests_for_spot_only_with_spot(market: Market) -> None:
    tagged = {one["ResourceType"]: one["Tags"] for one in launch("trn1.32xlarge", market)["TagSpecifications"]}
    spot = {"spot-instances-request"} if market is Market.SPOT else set()
    assert set(tagged) == {"instance", "volume", "network-interface"} | spot
    for tags in tagged.values():
        assert tuple(tag["Key"] for tag in tags) == TAGS
        # Tags with other signs keep an instance from reading its own, and spaces and slashes are such.
        assert not [tag["Key"] for tag in tags if set(tag["Key"]) & set(" /")]


def bought(request: Request) -> tuple[Any, Any]:
    return request.get("InstanceMarketOptions"), request.get("CapacityReservationSpecification")


def test_each_market_is_asked_for_in_ec2s_words() -> None:
    target = {"CapacityReservationTarget": {"CapacityReservationId": "cr-0a1b2c3d4e5f60718"}}
    spot = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate", "MaxPrice": "12.5000"}
    assert {market: bought(launch("trn1.32xlarge", market)) for market in Market} == {
        Market.RESERVED: (None, target),
        Market.BLOCK: ({"MarketType": "capacity-block"}, target),
        Market.OPEN: (None, {"CapacityReservationPreference": "open"}),
        Market.ON_DEMAND: (None, {"CapacityReservationPreference": "none"}),
        Market.INTERRUPTIBLE: ({"MarketType": "interruptible-capacity-reservation"}, target),
        Market.SPOT: ({"MarketType": "spot", "SpotOptions": spot}, None),
    }


def test_a_placement_group_is_the_pools_and_none_is_made_up() -> None:
    assert "Placement" not in launch("trn1.32xlarge", Market.RESERVED)
    there = launch("trn1.32xlarge", Market.RESERVED, placement_group="made-in-it")
    assert there["Placement"] == {"GroupName": "made-in-it"}


def asked(own: PoolView, unit: UnitView) -> Request:
    return run_instances(unit, AttemptView(1, "t" * 64, own, 2, BEGUN, BEGUN), BASE, "#!/bin/sh\n")


UNIT = UnitView("u-1", "us-east-1", "trn2u.48xlarge", 2, frozenset(Market))
POOL = pool(1, instance_type="trn2u.48xlarge")


@pytest.mark.parametrize(
    ("own", "unit", "why"),
    [
        (replace(POOL, market=Market.SPOT), UNIT,
         "trn2u.48xlarge is not sold as spot; it is as capacity-block, on-demand"),
        (replace(POOL, market=Market.BLOCK), UNIT, "a pool of market block needs the id of its reservation"),
        (POOL, replace(UNIT, count=3), "attempt 1 is not of unit u-1: its type or count is another"),
        (replace(POOL, instance_type="odd.large"), replace(UNIT, instance_type="odd.large"),
         "the network cards of odd.large are not known; add it to instance_interfaces.json"),
    ],
)  # fmt: skip
def test_what_ec2_would_refuse_is_never_asked(own: PoolView, unit: UnitView, why: str) -> None:
    with pytest.raises(ValueError, match=why.replace(".", r"\.")):
        asked(own, unit)


def test_the_same_attempt_asks_the_same() -> None:
    assert all(launch(name, Market.ON_DEMAND) == launch(name, Market.ON_DEMAND) for name in TYPES)


FAKES = {
    "curl": 'echo "curl $*" >>"$LOG"; while [ "$1" != -o ]; do shift; done; cp "$SENT" "$2"',
    "sleep": 'echo "sleep" >>"$LOG"; echo 9999999999 >"$CLOCK"',
    "shutdown": 'echo "shutdown $*" >>"$LOG"',
    "date": 'cat "$CLOCK"',
}
"""Commands that the script calls; `LOG` records the calls."""


def boot(folder: Path, sent: str, fakes: Mapping[str, str] = FAKES) -> tuple[str, str]:
    """Runs the script on a machine that receives this join script, with `folder` as its root. Returns its output and
    the commands it called."""
    commands = folder / "bin"
    commands.mkdir(exist_ok=True)
    (folder / "etc").mkdir(exist_ok=True)
    for name, text in fakes.items():
        (commands / name).write_text(f"#!/bin/sh\n{text}\n")
        (commands / name).chmod(0o755)
    (folder / "sent").write_text(sent)
    (folder / "clock").write_text("1000\n")
    (folder / "log").write_text("")
    known = {"PATH": f"{commands}:/usr/bin:/bin", "TMPDIR": str(folder), "SWITCHYARD_ROOT": str(folder)}
    files = {"LOG": str(folder / "log"), "SENT": str(folder / "sent"), "CLOCK": str(folder / "clock")}
    done = subprocess.run(
        ["/bin/sh", "-c", user_data(BOOT)], env=known | files, capture_output=True, text=True, timeout=30, check=False
    )
    assert not done.stderr
    return done.stdout, (folder / "log").read_text()


def test_a_machine_runs_what_the_control_plane_sends_and_knows_who_it_is(tmp_path: Path) -> None:
    names = ("SERVER", "PIN", "AWS_REGION", "INSTALL", "UNIT")
    printed, called = boot(tmp_path, "".join(f"echo {name}=${name}\n" for name in names))
    assert printed.splitlines() == [
        "SERVER=https://switchyard.example:8443",
        f"PIN=sha256//{'A' * 43}=",
        "AWS_REGION=us-east-1",
        "INSTALL=sw-0123456789ab",
        "UNIT=u-0a1b2c3d",
        "switchyard: joined",
    ]
    assert called.startswith(
        "curl -fsS --noproxy * --proto =https --connect-timeout 10 --max-time 60 -k --pinnedpubkey"
    )
    assert called.rstrip().endswith("https://switchyard.example:8443/join/aws")


def test_one_that_never_joins_tries_again_and_then_ends(tmp_path: Path) -> None:
    printed, called = boot(tmp_path, "exit 1\n")
    assert [line.split()[0] for line in called.splitlines()] == ["curl", "sleep", "curl", "shutdown"]
    assert "could not join https://switchyard.example:8443 within 3600 s, and ends" in printed


DISK_FAKES = {
    "lsblk": 'for disk; do :; done; cat "$ROOT_OF_TEST/uses/${disk##*/}"',
    "blkid": 'for disk; do :; done; grep . "$ROOT_OF_TEST/types/${disk##*/}" || exit 2',
    "mdadm": 'echo "mdadm $*" >>"$LOG"',
    "mkfs.xfs": 'echo "mkfs.xfs $*" >>"$LOG"',
    "mountpoint": 'grep -qxF "$2" "$ROOT_OF_TEST/mounts"',
    "mount": 'echo "mount $*" >>"$LOG"; echo "$1" >>"$ROOT_OF_TEST/mounts"',
}
INSTANCE, EBS = "Amazon_EC2_NVMe_Instance_Storage", "Amazon_Elastic_Block_Store"


class Disks:
    """A machine with disks. The commands that read them print recorded lines; the others are logged."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name in ("dev/disk/by-id", "uses", "types", "mnt"):
            (folder / name).mkdir(parents=True)
        (folder / "mounts").touch()

    def add(self, name: str, model: str, *, use: str = "", kind: str = "") -> None:
        """`use`: further words of `lsblk -nro NAME,MOUNTPOINT`; `kind`: what blkid finds on it."""
        (self._folder / "dev" / name).touch()
        for link in (f"nvme-{model}_{name}", f"nvme-{model}_{name}_1"):
            (self._folder / "dev/disk/by-id" / link).symlink_to(f"../../{name}")
        (self._folder / "uses" / name).write_text(f"{name} {use}\n")
        (self._folder / "types" / name).write_text(kind)

    def boot(self) -> tuple[list[str], Path]:
        """Returns the logged commands, without the folder of the test, and the cache that agents get."""
        fakes = {name: text.replace("$ROOT_OF_TEST", str(self._folder)) for name, text in DISK_FAKES.items()}
        printed, called = boot(self._folder, 'echo "cache=$SWITCHYARD_CACHE"\n', FAKES | fakes)
        [cache] = [line[6:] for line in printed.splitlines() if line.startswith("cache=")]
        lines = [line.replace(str(self._folder), "") for line in called.splitlines()]
        return [line for line in lines if not line.startswith("curl")], Path(cache)


@pytest.fixture
def disks(tmp_path: Path) -> Disks:
    return Disks(tmp_path)


def test_free_disks_of_the_instance_become_one_file_system_and_all_others_stay(disks: Disks, tmp_path: Path) -> None:
    disks.add("nvme0n1", EBS, use="nvme0n1p1 /", kind="gpt")
    disks.add("nvme5n1", EBS)
    disks.add("nvme1n1", INSTANCE)
    disks.add("nvme2n1", INSTANCE)
    disks.add("nvme3n1", INSTANCE, use="/data")
    disks.add("nvme4n1", INSTANCE, kind="xfs")
    (tmp_path / "var/cache/switchyard/engines/vllm").mkdir(parents=True)

    commands, cache = disks.boot()

    assert commands == [
        "mdadm --create /dev/md/switchyard --run --level=0 --raid-devices=2 /dev/nvme1n1 /dev/nvme2n1",
        "mkfs.xfs -q -L switchyard /dev/md/switchyard",
        "mount /mnt/switchyard",
    ]
    assert cache == tmp_path / "mnt/switchyard/switchyard-cache"
    assert (cache / "engines/vllm").is_dir(), "the image's engines are hidden"
    assert "nofail,x-systemd.before=switchyard-machine.service" in (tmp_path / "etc/fstab").read_text()
    assert disks.boot() == ([], cache), "a second run changes something"
    assert (tmp_path / "etc/fstab").read_text().count("LABEL=switchyard") == 1


def test_a_single_disk_needs_no_raid(disks: Disks) -> None:
    disks.add("nvme1n1", INSTANCE)
    assert disks.boot()[0] == ["mkfs.xfs -q -L switchyard /dev/nvme1n1", "mount /mnt/switchyard"]


def test_disks_that_the_image_mounts_are_used_where_they_are(disks: Disks, tmp_path: Path) -> None:
    disks.add("nvme1n1", INSTANCE, use="vg.01-lv_ephemeral /opt/dlami/nvme", kind="LVM2_member")
    (tmp_path / "opt/dlami/nvme").mkdir(parents=True)
    (tmp_path / "mounts").write_text(f"{tmp_path}/opt/dlami/nvme\n")
    assert disks.boot() == ([], tmp_path / "opt/dlami/nvme/switchyard-cache")


def test_no_mount_hides_files(disks: Disks, tmp_path: Path) -> None:
    disks.add("nvme1n1", INSTANCE)
    (tmp_path / "mnt/switchyard").mkdir()
    (tmp_path / "mnt/switchyard/of-somebody").touch()
    assert disks.boot() == ([], tmp_path / "var/cache/switchyard")


def test_a_machine_without_such_disks_uses_its_root_volume(disks: Disks, tmp_path: Path) -> None:
    disks.add("nvme0n1", EBS, use="nvme0n1p1 /", kind="gpt")
    assert disks.boot() == ([], tmp_path / "var/cache/switchyard")


def test_it_is_a_script_of_any_shell_and_far_below_the_limit() -> None:
    text = user_data(replace(BOOT, server=f"https://{'a' * 260}", pin=";".join([BOOT.pin] * 8)))
    assert text.startswith("#!/bin/sh\n")
    assert len(text.encode()) < BYTES_MOST / 2
    subprocess.run(["/bin/sh", "-n"], input=text, text=True, timeout=30, check=True)


@pytest.mark.parametrize("field", ["server", "pin", "region", "install", "unit"])
@given(st.text(alphabet="a-'\"$`;\n \\/é", min_size=1, max_size=12).filter(lambda text: text.strip("a-") != ""))
def test_nothing_gets_into_the_script_that_has_another_form(field: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"{field} .* does not match"):
        user_data(replace(BOOT, **{field: text}))
