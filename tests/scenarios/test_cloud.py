"""A fleet in a cloud, from declared stacks, region and deployment. Instances boot as hosts that prove their identity
and join. One is terminated externally, and the cell serves again. Another gets an interruption notice from its own
metadata while the queue of notices cannot be read.
"""

import json
import re

import pytest

from tests.scenarios.lab_cloud import REGION, Cloud, cloud, eventually

__all__ = ["cloud"]

pytestmark = [pytest.mark.long, pytest.mark.scenario, pytest.mark.own_fleet, pytest.mark.timeout(900)]

INSTANCE = re.compile(r"i-[0-9a-f]{17}")


def test_a_cloud_launches_a_fleet_and_heals_what_it_takes(cloud: Cloud) -> None:
    said = cloud.lab("cloud", "up", "--detach", "--region", REGION, "--round-trip", "10ms")
    assert "every cell is ready, on 2 instances each" in said
    assert "".join(eventually(cloud.streamed, "an answer is streamed"))

    assert not cloud.rows("incidents/?kind=hardware-differs"), "an instance lacks devices of its type"
    before = cloud.nodes()
    assert len(before) == 2
    assert all(INSTANCE.fullmatch(instance) for instance in before.values())
    cloud.declare_spot_first()
    cloud.lab("cloud", "terminate", taken := sorted(before.values())[0])

    def healed() -> dict[str, str]:
        found = cloud.nodes()
        return found if len(found) == 2 and taken not in found.values() else {}

    after = eventually(healed, "the cell is ready on other instances")
    assert set(after.values()) & set(before.values())
    assert "".join(eventually(cloud.streamed, "an answer is streamed again"))
    [end] = [line for line in cloud.lab("cloud", "instances").splitlines() if taken in line]
    assert "running" not in end
    heed_what_the_metadata_alone_says(cloud)
    assert json.loads(cloud.lab("status", "--json"))["hosts"]
    assert cloud.lab("down") == "The laboratory has ended.\n"


def heed_what_the_metadata_alone_says(cloud: Cloud) -> None:
    [(node, instance)] = eventually(cloud.spot_spares, "what took a spare's place is spot").items()
    cloud.lab("cloud", "refuse", "ReceiveMessage", "AccessDenied", "--times", "100000")
    unread = "incidents/?state=open&kind=notices-unread"
    eventually(lambda: cloud.rows(unread), "nobody waits at the queue any more, where the warning would still come")
    cloud.lab("cloud", "spot-warning", instance)

    def said() -> list[str]:
        events = cloud.rows("events/?page_size=500")
        return [row["message"] for row in events if row["kind"] == "node.notice" and node in row["message"]]

    [message] = eventually(said, "its notice is known")
    assert message.startswith(f"{node}: interruption until ")
    assert message.endswith(": reported by the machine's own metadata")

    def replaced() -> bool:
        return bool(spares := cloud.spot_spares()) and node not in spares

    eventually(replaced, "another one took its place before it ended")
    cloud.lab("cloud", "heal")
