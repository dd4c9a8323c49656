"""The instance metadata service of one machine: 169.254.169.254 as the machine's own programs see it, IMDSv2 alone.

It listens on a given socket that is bound inside the machine's network. The hop limit needs no code, because that
address is not routed and cannot be reached from outside. Keys of the role are real keys of this cloud, of a session
named after the instance, so STS accepts signatures by them."""

import base64
import json
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

from lab.cloud.machines import Machine, Market
from lab.cloud.server import serving
from lab.cloud.world import World, moment

TOKENS_AT = "/latest/api/token"
TTL = range(1, 21601)
"""Seconds that a token may live: up to six hours."""
VERSION = re.compile(r"latest|20\d\d-\d\d-\d\d")
ROLE_KEYS_FOR_S = 6 * 3600
RENEWED_BEFORE_S = 600
"""AWS has new keys there at least five minutes before the old ones expire."""
SLOWEST_REQUEST_S = 30.0

Tree = Mapping[str, "Tree | str"]
Reply = tuple[int, str, dict[str, str]]


class Metadata:
    """The answers for one machine. Threads may share it."""

    def __init__(self, world: World, machine_id: str) -> None:
        self._world, self._id = world, machine_id
        self._tokens: dict[str, float] = {}
        self._role_keys: Any = None
        self._lock = threading.Lock()

    def reply(self, method: str, path: str, headers: Mapping[str, str]) -> Reply:
        with self._lock:
            if method == "PUT":
                return self._new_token(path, headers)
            ends = self._tokens.get(headers.get("x-aws-ec2-metadata-token", ""))
            if ends is None or self._world.clock.now() >= ends:
                return 401, "", {}
            with self._world.settled():
                return _find_reply(self._tree(), path)

    def _new_token(self, path: str, headers: Mapping[str, str]) -> Reply:
        if path != TOKENS_AT:
            return 405, "", {"Allow": "OPTIONS, HEAD, GET"}
        if "x-forwarded-for" in headers:
            return 403, "", {}
        ttl = headers.get("x-aws-ec2-metadata-token-ttl-seconds", "")
        if not re.fullmatch("[0-9]{1,5}", ttl) or int(ttl) not in TTL:
            return 400, "", {}
        token = secrets.token_urlsafe(40)
        self._tokens[token] = self._world.clock.now() + int(ttl)
        return 200, token, {"X-Aws-Ec2-Metadata-Token-Ttl-Seconds": ttl}

    def _tree(self) -> Tree:
        machine = self._world.machines.get(self._id)
        if machine is None:
            return {}
        user_data = base64.b64decode(str(machine.moto.user_data or "")).decode("utf-8", "surrogateescape")
        return {
            "meta-data": _without_gaps(self._meta_data(machine)),
            "dynamic": {"instance-identity": {"document": _lines(self._document(machine))}},
            **({"user-data": user_data} if user_data else {}),
        }

    def _meta_data(self, machine: Machine) -> Tree:
        moto = machine.moto
        nic = machine.interfaces[0].moto
        zone = next(z for z in _zones(self._world, machine.region) if z.name == machine.zone)
        return {
            "ami-id": moto.image_id,
            "ami-launch-index": str(moto.ami_launch_index),
            "events": {
                "maintenance": {"history": "[]", "scheduled": json.dumps([_event(each) for each in machine.events])},
                "recommendations": {"rebalance": _rebalance(machine)},
            },
            "hostname": moto.private_dns_name,
            "iam": self._iam(machine),
            "instance-id": machine.id,
            "instance-life-cycle": _LIFE_CYCLE.get(machine.market, "on-demand"),
            "instance-type": machine.instance_type,
            "local-hostname": moto.private_dns_name,
            "local-ipv4": moto.private_ip_address,
            "mac": nic.mac_address,
            "placement": {
                "availability-zone": machine.zone,
                "availability-zone-id": zone.zone_id,
                "group-name": machine.group,
                "region": machine.region,
            },
            "reservation-id": self._reservation(machine),
            "spot": _spot(machine),
            "tags": self._tags(machine),
        }

    def _iam(self, machine: Machine) -> Tree:
        held = self._world.backend("ec2", machine.region).iam_instance_profile_associations.get(machine.id)
        if held is None or not held.iam_instance_profile.roles:
            return {}
        role = held.iam_instance_profile.roles[0]
        keys = self._keys(machine, role.arn)
        begun = keys.expiration - timedelta(seconds=ROLE_KEYS_FOR_S)
        profile = {"InstanceProfileArn": held.iam_instance_profile.arn, "InstanceProfileId": "AIPA"}
        return {
            "info": _lines({"Code": "Success", "LastUpdated": _stamp(begun), **profile}),
            "security-credentials": {
                role.name: _lines(
                    {
                        "Code": "Success",
                        "LastUpdated": _stamp(begun),
                        "Type": "AWS-HMAC",
                        "AccessKeyId": keys.access_key_id,
                        "SecretAccessKey": keys.secret_access_key,
                        "Token": keys.session_token,
                        "Expiration": _stamp(keys.expiration),
                    }
                )
            },
        }

    def _keys(self, machine: Machine, role_arn: str) -> Any:
        """By the real clock, which is that of signatures."""
        held = self._role_keys
        if (
            held is None
            or _of_moto(held.expiration).timestamp() - time.time() < RENEWED_BEFORE_S
            or held.role_arn != role_arn
        ):
            sts = self._world.backend("sts", "aws")
            self._role_keys = held = sts.assume_role(
                region_name=machine.region, role_session_name=machine.id, role_arn=role_arn, policy="",
                duration=ROLE_KEYS_FOR_S, external_id="",
            )  # fmt: skip
        return held

    def _reservation(self, machine: Machine) -> str:
        reservations = self._world.backend("ec2", machine.region).reservations.values()
        return next((str(each.id) for each in reservations if machine.moto in each.instances), "")

    def _tags(self, machine: Machine) -> Tree:
        if machine.moto.metadata_options.instance_metadata_tags != "enabled":
            return {}
        tags = self._world.backend("ec2", machine.region).describe_tags(filters={"resource-id": [machine.id]})
        return {"instance": {each["key"]: each["value"] for each in tags}}

    def _document(self, machine: Machine) -> dict[str, Any]:
        return {
            "accountId": self._world.account,
            "architecture": machine.moto.architecture or "x86_64",
            "availabilityZone": machine.zone,
            "imageId": machine.moto.image_id,
            "instanceId": machine.id,
            "instanceType": machine.instance_type,
            "pendingTime": _stamp(moment(machine.launched)),
            "privateIp": machine.moto.private_ip_address,
            "region": machine.region,
            "version": "2017-09-30",
        }


_LIFE_CYCLE = {Market.SPOT: "spot", Market.BLOCK: "capacity-block", Market.INTERRUPTIBLE: "interruptible"}


def _zones(world: World, region: str) -> Any:
    return world.backend("ec2", region).describe_availability_zones()


def _spot(machine: Machine) -> Tree:
    if machine.market is not Market.SPOT or machine.interrupted is None:
        return {}
    at = _stamp(moment(machine.interrupted))
    return {"instance-action": json.dumps({"action": "terminate", "time": at}), "termination-time": at}


def _rebalance(machine: Machine) -> str:
    if machine.rebalance_at is None:
        return ""
    return json.dumps({"noticeTime": _stamp(moment(machine.rebalance_at))})


def _event(event: Mapping[str, Any]) -> dict[str, str]:
    return {
        "NotBefore": event["NotBefore"].strftime("%d %b %Y %H:%M:%S GMT"),
        "Code": event["Code"],
        "Description": event["Description"],
        "EventId": event["InstanceEventId"],
        "State": "active",
    }


def _find_reply(tree: Tree, path: str) -> Reply:
    version, _, rest = path.removeprefix("/").partition("/")
    at: Tree | str | None = tree if VERSION.fullmatch(version) else None
    for name in filter(None, rest.split("/")):
        at = at.get(name) if isinstance(at, Mapping) else None
    if at is None:
        return 404, "", {}
    if isinstance(at, str):
        return 200, at, {}
    return 200, "\n".join(f"{name}/" if isinstance(below, Mapping) else name for name, below in at.items()), {}


def _without_gaps(tree: Tree) -> Tree:
    """What is empty is not there: 404, as most of it is most of the time."""
    kept = {name: _without_gaps(below) if isinstance(below, Mapping) else below for name, below in tree.items()}
    return {name: below for name, below in kept.items() if below}


def _lines(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=2)


def _of_moto(at: datetime) -> datetime:
    return at.replace(tzinfo=UTC)


def _stamp(at: datetime) -> str:
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, listener: socket.socket, reply: Callable[[str, str, Mapping[str, str]], Reply]) -> None:
        super().__init__(("", 0), _Request, bind_and_activate=False)
        self.socket.close()
        self.socket, self.reply = listener, reply
        self.server_address = listener.getsockname()
        self.server_activate()

    def handle_error(self, request: Any, client_address: Any) -> None: ...


class _Request(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = SLOWEST_REQUEST_S
    server_version, sys_version = "EC2ws", ""

    def do_GET(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def _answer(self) -> None:
        given = {name.lower(): value for name, value in self.headers.items()}
        status, text, headers = cast("_Server", self.server).reply(self.command, self.path, given)
        body = text.encode("utf-8", "surrogateescape")
        self.close_connection = True
        self.send_response(status)
        for name, value in {"Content-Type": "text/plain", "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None: ...


def serve_metadata(world: World, machine_id: str, listener: socket.socket) -> AbstractContextManager[None]:
    """Answer a machine's questions at a socket that is bound already, by threads of this process. Closes it at the
    end."""
    return serve_replies(listener, Metadata(world, machine_id).reply, f"imds-{machine_id}")


def serve_replies(
    listener: socket.socket, reply: Callable[[str, str, Mapping[str, str]], Reply], name: str
) -> AbstractContextManager[None]:
    """Answers method, path and headers of each request at a bound socket. Closes it at the end."""
    return serving(_Server(listener, reply), name)
