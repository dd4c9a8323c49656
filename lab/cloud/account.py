"""GetCallerIdentity with a check of the signature, the price list, and quotas by name.

moto checks no signature, answers for keys that it never made, and knows neither prices nor quotas of EC2. A signature
is rejected only where AWS rejects it. A caller that requires more, such as a signed header, has to check that."""

import hmac
import json
import re
import time
from calendar import timegm
from typing import Any

from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from lab.cloud.machines import FAMILIES, STANDARD
from lab.cloud.wire import Call, Refused
from lab.cloud.world import World, handles

AUTHORIZATION = re.compile(
    r"AWS4-HMAC-SHA256 Credential=[^, ]+, ?SignedHeaders=([a-z0-9;-]+), ?Signature=([0-9a-f]{64})"
)
VALID_S = 900.0
"""Before and after the time of a signature: 15 minutes."""
ALWAYS_SIGNED = {"host", "x-amz-date"}


@handles("sts", "GetCallerIdentity")
def get_caller_identity(world: World, call: Call) -> dict[str, Any]:
    secret, session_token = _secret_of(world, call.access_key)
    check_signature(call, secret, session_token)
    if call.access_key == world.access_key:
        arn = f"arn:aws:iam::{world.account}:user/control"
        return {"UserId": world.access_key, "Account": world.account, "Arn": arn}
    return world.moto(call)


def _secret_of(world: World, access_key: str) -> tuple[str, str]:
    if access_key == world.access_key:
        return world.secret, ""
    if role := world.backend("sts", "aws").get_assumed_role_from_access_key(access_key):
        return role.secret_access_key, role.session_token
    for user in world.backend("iam", "aws").users.values():
        for key in user.access_keys:
            if key.access_key_id == access_key:
                return key.secret_access_key, ""
    raise Refused("InvalidClientTokenId", "The security token included in the request is invalid.")


def check_signature(call: Call, secret: str, session_token: str) -> None:
    """By the real clock, for that is the one that clients sign by. Raises Refused if it is malformed, of another time,
    or not of this key over this request."""
    environ = call.environ
    signed = AUTHORIZATION.fullmatch(environ.get("HTTP_AUTHORIZATION", ""))
    if not signed or not set(signed[1].split(";")) >= ALWAYS_SIGNED:
        raise Refused("IncompleteSignature", "Authorization needs a signature over at least host and x-amz-date.")
    if not hmac.compare_digest(environ.get("HTTP_X_AMZ_SECURITY_TOKEN", ""), session_token):
        raise Refused("InvalidClientTokenId", "The security token included in the request is invalid.")
    date = environ.get("HTTP_X_AMZ_DATE", "")
    _check_date(date)
    headers = {name: environ.get(_variable(name), "") for name in signed[1].split(";")}
    query = f"?{environ['QUERY_STRING']}" if environ.get("QUERY_STRING") else ""
    url = f"http://{environ['HTTP_HOST']}{environ.get('PATH_INFO', '/')}{query}"
    request = AWSRequest(environ["REQUEST_METHOD"], url, headers, call.body)
    request.context["timestamp"] = date
    auth = SigV4Auth(Credentials(call.access_key, secret), call.service, call.region)
    expected = auth.signature(auth.string_to_sign(request, auth.canonical_request(request)), request)
    if not hmac.compare_digest(expected, signed[2]):
        raise Refused("SignatureDoesNotMatch", "The request signature we calculated does not match.")


def _variable(name: str) -> str:
    variable = name.upper().replace("-", "_")
    return variable if variable in ("CONTENT_TYPE", "CONTENT_LENGTH") else f"HTTP_{variable}"


def _check_date(date: str) -> None:
    try:
        at = timegm(time.strptime(date, "%Y%m%dT%H%M%SZ"))
    except ValueError:
        raise Refused("IncompleteSignature", "X-Amz-Date is no date.") from None
    if abs(time.time() - at) > VALID_S:
        raise Refused("SignatureDoesNotMatch", f"Signature expired: {date} is not within 15 minutes of now.")


@handles("sts", "DecodeAuthorizationMessage")
def decode_authorization_message(world: World, call: Call) -> dict[str, Any]:
    """What a test put into `world.denials`."""
    encoded = call.params["EncodedMessage"]
    if encoded not in world.denials:
        raise Refused("InvalidAuthorizationMessageException", "The message is invalid.")
    return {"DecodedMessage": world.denials[encoded]}


PRICING_REGIONS = ("us-east-1", "eu-central-1", "ap-south-1")
"""Where the price list of all regions is served."""
UNBOUND = 100_000
"""vCPUs of a quota that no test has set."""
QUOTAS = {
    name: f"L-{number:08X}"
    for number, name in enumerate(
        f"{before}{family}{after}"
        for family in (*FAMILIES.values(), STANDARD)
        for before, after in (("Running On-Demand ", " instances"), ("All ", " Spot Instance Requests"))
    )
}
"""Name -> code. Codes are made up: what is looked for by its code is not found here."""


@handles("pricing", "GetProducts")
def get_products(world: World, call: Call) -> dict[str, Any]:
    if call.region not in PRICING_REGIONS:
        raise Refused("AccessDeniedException", f"There is no price list in {call.region}.")
    asked = {each["Field"]: each["Value"] for each in call.params.get("Filters") or ()}
    found = [
        _product(kind, region, price)
        for (kind, region), price in sorted(world.prices.items())
        if asked.get("instanceType", kind) == kind and asked.get("regionCode", region) == region
    ]
    return {"FormatVersion": "aws_v1", "PriceList": found}


def _product(instance_type: str, region: str, price: float) -> str:
    sku = f"SKU{instance_type}{region}".upper()
    dimension = {"unit": "Hrs", "description": "Linux", "pricePerUnit": {"USD": f"{price:.10f}"}}
    terms = {"OnDemand": {f"{sku}.T": {"sku": sku, "priceDimensions": {f"{sku}.T.D": dimension}}}}
    attributes = {"instanceType": instance_type, "regionCode": region, "operatingSystem": "Linux"}
    return json.dumps({"product": {"sku": sku, "attributes": attributes}, "terms": terms})


@handles("service-quotas", "ListServiceQuotas")
def list_service_quotas(world: World, call: Call) -> dict[str, Any]:
    if call.params["ServiceCode"] != "ec2":
        raise Refused("NoSuchResourceException", f"There is no service {call.params['ServiceCode']}.")
    names, first = list(QUOTAS), not call.params.get("NextToken")
    half = len(names) // 2
    return {
        "Quotas": [
            {
                "ServiceCode": "ec2", "QuotaName": name, "QuotaCode": QUOTAS[name], "Unit": "None",
                "Value": float(world.quotas.get(name, UNBOUND)), "Adjustable": True, "GlobalQuota": False,
            }
            for name in (names[:half] if first else names[half:])
        ],
        **({"NextToken": "2"} if first else {}),
    }  # fmt: skip
