"""A fleet in a cloud, on a laboratory's hosts: c1 runs the control plane, and the cloud has the stacks of `deploy/aws`.
Regions and a deployment are created by the API; machines that the cloud launches join automatically."""

import secrets
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from lab.hosts import client, cloud_control
from lab.hosts.cloud_control import PORT, Settings
from lab.hosts.file_tree import remove_files
from lab.hosts.fleet import (
    DEPLOYMENT,
    INGRESS_PORT,
    NODES_PER_CELL,
    READY_WITHIN_S,
    UP_WITHIN_S,
    Fleet,
    Ports,
    install_control_plane,
)
from lab.hosts.places import Places
from lab.hosts.topology import CLOUD, NoLaboratory, Topology

NAME = "cloud-trail.txt"
"""In SWITCHYARD_HOME."""
ANSWERED_WITHIN_S = 60.0
PAGE = "events/?page_size=500"


@dataclass(frozen=True, slots=True)
class Happened:
    """`what`: `step` of the command, or the kind of an event."""

    at: datetime
    what: str
    text: str


class Trail:
    """The steps of one run, which are also printed. `now`: the time of day."""

    def __init__(self, say: Callable[[str], None], now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._say, self._now = say, now
        self._steps: list[Happened] = []

    def say(self, text: str) -> None:
        self._steps.append(Happened(self._now(), "step", text))
        self._say(text)

    def write(self, path: Path, ask: Callable[[str, str], Any]) -> None:
        """The steps so far with the fleet's events among them. `ask`: its REST API, by method and path; where it does
        not answer, the file says so."""
        events: list[Happened] = []
        try:
            events = [event_of(row) for row in _pages(ask)]
        except NoLaboratory as error:
            self._steps.append(Happened(self._now(), "step", f"events could not be read: {error}"))
        path.write_text(text_of([*self._steps, *events]))


def event_of(row: Mapping[str, Any]) -> Happened:
    return Happened(datetime.fromisoformat(row["at"]).astimezone(UTC), row["kind"], row["message"])


def text_of(happened: Iterable[Happened]) -> str:
    ordered = sorted(happened, key=lambda one: one.at)
    width = max((len(one.what) for one in ordered), default=0)
    return "".join(
        f"{one.at:%H:%M:%S} {(one.at - ordered[0].at).total_seconds():8.1f} s  {one.what:<{width}}  {one.text}\n"
        for one in ordered
    )


def streamed(base_url: str, model: str) -> str:
    from openai import OpenAI, OpenAIError  # half a second, which other commands need not take

    try:
        with OpenAI(base_url=base_url, api_key="none", timeout=ANSWERED_WITHIN_S, max_retries=0) as client:
            stream = client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": "What is the capital of France?"}],
                max_tokens=16,
                stream=True,
            )
            return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    except OpenAIError as error:
        raise NoLaboratory(str(error)) from None


def _pages(ask: Callable[[str, str], Any]) -> Iterable[Mapping[str, Any]]:
    path: str | None = PAGE
    while path:
        page = ask("GET", path)
        yield from page["results"]
        path = page["next"] and f"events/?{str(page['next']).partition('?')[2]}"


INSTANCE_TYPE = "trn1.32xlarge"
INSTALL_ID = "install-id"
VERSION = f"{DEPLOYMENT}@1"
CLOUD_ABOVE = 2
"""The cloud's port on the real host is so much above that of the dashboard."""
PENDING_S = 2.0
AWS, ECS = "aws", "ecs"
INGRESS_TYPE = "c7i.2xlarge"
REGISTRY = "000000000000.dkr.ecr.us-east-1.amazonaws.com"
IMAGES = {"NodeImage": f"{REGISTRY}/node-agent:1.0", "IngressImage": f"{REGISTRY}/ingress:1.0"}
CELLS, CONTAINER_INSTANCES = 2, 6
"""Of a region on ECS: its cells, and its machines for nodes. Two are left for a spare and its replacement."""
REGION_READ_WITHIN_S = 120.0


def forwards(topology: Topology, ports: Ports) -> list[client.Forward]:
    return [
        *ports.forwards(topology),
        client.Forward(ports.web + CLOUD_ABOVE, CLOUD, PORT),
        *(
            client.Forward(ports.ingress + number, region, INGRESS_PORT)
            for number, region in enumerate(topology.regions)
        ),
    ]


def new_settings() -> Settings:
    return Settings(f"AKIA{secrets.token_hex(8).upper()}", secrets.token_hex(20), PENDING_S)


def prepare(places: Places, topology: Topology, settings: Settings) -> None:
    """An empty install for an empty cloud: what an earlier one knew is in no cloud any more."""
    remove_files(places.home / "hosts")
    own = {
        "SWITCHYARD_DEMO_PROVIDER": "aws",
        "AWS_ENDPOINT_URL": f"http://{topology.host(CLOUD).address}:{PORT}",
        "AWS_ACCESS_KEY_ID": settings.access_key,
        "AWS_SECRET_ACCESS_KEY": settings.secret,
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    install_control_plane(places, topology, Path(sys.executable), own)


def show(running: "CloudFleet", forwards: list[client.Forward]) -> None:
    print(running.login())
    for each in forwards[1:]:
        what = "Cloud" if each.host == CLOUD else "Ingress"
        print(f"  {what:<9}  http://127.0.0.1:{each.here}{'' if each.host == CLOUD else '/v1'}  ({each.host})")
    print(f"  Trail      {running.trail}")


class CloudFleet(Fleet):
    """`provider`: `aws` for nodes on EC2 instances, `ecs` for nodes as tasks of a cluster in each region."""

    def __init__(
        self, places: Places, topology: Topology, ports: Ports, say: Callable[[str], None], provider: str = AWS
    ) -> None:
        self._provider = provider
        self._steps = Trail(say)
        super().__init__(places, topology, ports, self._steps.say)
        self._home, self._entry = places.home.parent, ports.ingress
        self.trail = self._home / NAME
        """Returns the trail, a line for each event, after the start or its failure."""

    def bring_up(self) -> None:
        """Deploy the stacks, declare regions and a deployment, and wait until every cell serves and answers. What
        happened is in `trail`. Raises NoLaboratory if one of these did not happen; the text says what was last seen of
        it."""
        try:
            self._bring_up()
        except NoLaboratory as error:
            self._steps.say(f"it ends here: {error}")
            raise
        finally:
            self._steps.write(self.trail, self.ask)

    def _bring_up(self) -> None:
        self.until(self._answers, UP_WITHIN_S, "the control plane does not answer")
        self._say("the control plane answers")
        shutil.copy(self.token, self._home / self.token.name)
        stacks = self._deploy()
        self._say(f"the cloud has the stacks {', '.join(stacks.values())}")
        for position, (region, stack) in enumerate(stacks.items()):
            columns = {"provider": self._provider, "stack": stack, "position": position, "spares": {INSTANCE_TYPE: 1}}
            self.ask("POST", "regions/", {"name": region, **columns})
        self.until(self._every_region_is_read, REGION_READ_WITHIN_S, "not every region is ready")
        self._say("every region is read from its stack")
        cells = [{"region": region, "cells": CELLS if self._provider == ECS else 1} for region in stacks]
        wanted: dict[str, Any] = {"name": DEPLOYMENT, "model_version": VERSION, "instance_types": [INSTANCE_TYPE]}
        self.ask("POST", "deployments/", {**wanted, "regions": cells})
        self.until(self._every_cell_is_ready, READY_WITHIN_S, "not every cell is ready")
        self._say(f"every cell is ready, on {NODES_PER_CELL} {'instances' if self._provider == AWS else 'tasks'} each")
        for number, region in enumerate(stacks):
            url = f"http://127.0.0.1:{self._entry + number}/v1"
            self.until(partial(self._answers_in, region, url), ANSWERED_WITHIN_S, f"{region} does not answer")

    def _deploy(self) -> dict[str, str]:
        given: dict[str, Any] = {"install": self._install(), "networks": self._networks()}
        if self._provider == ECS:
            given |= {"machines": {INSTANCE_TYPE: CONTAINER_INSTANCES, INGRESS_TYPE: 2}, "images": IMAGES}
        stacks: dict[str, str] = cloud_control.ask("deploy" if self._provider == AWS else "deploy-cluster", **given)
        return stacks

    def missing(self) -> str:
        return self._every_region_is_read() or self._every_cell_is_ready()

    def _answers(self) -> str:
        self.ask("GET", "regions/")
        return ""

    def _answers_in(self, region: str, url: str) -> str:
        answer = streamed(url, DEPLOYMENT)
        self._say(f"{region} streamed an answer of {len(answer)} characters at {url}")
        return ""

    def _install(self) -> str:
        return (self.token.with_name(INSTALL_ID)).read_text().strip()

    def _networks(self) -> dict[str, str]:
        networks = ((region, self._topology.networks[region]) for region in self._topology.regions)
        return {region: str(network.network_address).removesuffix(".0.0") for region, network in networks}

    def _every_region_is_read(self) -> str:
        found = self.ask("GET", "regions/")["results"]
        return "; ".join(
            f"{each['name']} is {each['cloud']['state']}: {each['cloud']['reason']}"
            for each in found
            if each["cloud"]["state"] != "ready"
        )

    def _every_cell_is_ready(self) -> str:
        cells = self.rows("cells")
        waiting = [f"{cell['id']} is {cell['state']}" for cell in cells if cell["state"] not in {"ready", "stopped"}]
        return "; ".join(waiting) or ("" if cells else "there is none")
