"""Has the cloud of a laboratory do something, from outside: see `lab.hosts.cloud_control_api`."""

from dataclasses import dataclass
from typing import Any

import httpx

from lab.hosts import client
from lab.hosts.places import read_places
from lab.hosts.topology import CLOUD, NoLaboratory

PORT = 5000


@dataclass(frozen=True, slots=True)
class Settings:
    """`access_key`, `secret`: of the control plane. `pending_s`: how long an instance is pending. `address`: of the
    host at which the cloud answers."""

    access_key: str
    secret: str
    pending_s: float
    address: str = ""

    @property
    def url(self) -> str:
        return f"http://{self.address}:{PORT}"


ANSWERS_WITHIN_S = 60.0


def url_of_cloud() -> str:
    places = read_places()
    port = next((each.here for each in client.forwards_of(places) if each.host == CLOUD), None)
    if port is None:
        raise NoLaboratory(f"The laboratory in {places.home} has no cloud: `make up CLOUD=aws` makes one that has.")
    return f"http://127.0.0.1:{port}"


def ask(what: str, **given: Any) -> Any:
    try:
        answer = httpx.post(f"{url_of_cloud()}/cloud/{what}", json=given, timeout=ANSWERS_WITHIN_S).json()
    except (httpx.HTTPError, ValueError) as error:
        raise NoLaboratory(f"The cloud does not answer: {error!r}.") from None
    if "error" in answer:
        raise NoLaboratory(answer["error"])
    return answer["done"]
