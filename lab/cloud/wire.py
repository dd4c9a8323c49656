"""AWS's wire formats, driven by botocore's service models: a request into its operation and parameters, an answer back.

moto's parsers and serialisers are used alone. Answers are held to the model: a member that AWS does not have is an
error of these tools, never something that the code under test could come to rely on."""

import io
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode

from botocore.model import OperationModel
from botocore.parsers import create_parser
from botocore.validate import ParamValidator
from moto.core.errors import COMMON_ERROR_CODES
from moto.core.exceptions import ServiceException
from moto.core.parse import PROTOCOL_PARSERS
from moto.core.request import determine_request_protocol
from moto.core.serialize import get_serializer_class
from moto.core.utils import get_service_model

SIGNING_NAMES = {"elasticloadbalancing": "elbv2", "monitoring": "cloudwatch", "servicequotas": "service-quotas"}
"""Service in a signature -> its model, where they differ."""
CREDENTIAL = re.compile(r"Credential=([^/, ]+)/\d+/([^/, ]+)/([^/, ]+)/aws4_request")
HTTP_STATUS = {
    "InsufficientInstanceCapacity": 500,
    "InternalError": 500,
    "InternalFailure": 500,
    "ServerException": 500,
    "Unavailable": 503,
    "ServiceUnavailable": 503,
    "RequestLimitExceeded": 503,
    "SlowDown": 503,
    "ConditionalRequestConflict": 409,
    "Throttling": 400,
    "DryRunOperation": 412,
    "UnauthorizedOperation": 403,
    "AccessDenied": 403,
    "SignatureDoesNotMatch": 403,
    "InvalidClientTokenId": 403,
    "MissingAuthenticationToken": 403,
    "IncompleteSignature": 400,
    "NotInThisCloud": 400,
    "UnrecognizedClientException": 403,
}
"""HTTP status of an error, if not the protocol's default (400). botocore retries 500 and above."""
COMMON_ERROR_CODES.extend(HTTP_STATUS)  # codes of any service, for which moto would warn that a model lacks them
NOT_IN_THIS_CLOUD = "NotInThisCloud"
"""Code of the error for calls that neither moto nor this package knows. AWS says no such thing."""

Answer = tuple[int, list[tuple[str, str]], bytes]
Environ = dict[str, Any]


class Refused(ServiceException):
    """An error as AWS gives it: `Refused(code, message)`. moto looks an error up in the package that raised it, so this
    one cannot be mistaken for an error of a model's own shape."""

    @property
    def status(self) -> int | None:
        """HTTP status; None: the protocol's own."""
        return HTTP_STATUS.get(self.code)


@dataclass(frozen=True)
class Call:
    """One request. `operation` is empty for what no model describes."""

    service: str
    operation: str
    region: str
    access_key: str
    environ: Environ = field(repr=False)
    body: bytes = field(repr=False)
    params: Mapping[str, Any] = field(default_factory=dict)

    @property
    def form(self) -> dict[str, str]:
        """The body of the protocols `ec2` and `query`."""
        return dict(parse_qsl(self.body.decode("latin1"), keep_blank_values=True))


@cache
def _operations(service: str) -> tuple[tuple[str, re.Pattern[str], str], ...]:
    """Of a service with REST: method, path, operation."""
    model, found = get_service_model(service), []
    for name in model.operation_names:
        http = model.operation_model(name).http
        path = re.escape(http["requestUri"].partition("?")[0]).replace(r"\{", "{").replace(r"\}", "}")
        pattern = re.sub(r"\{(\w+)(?:\\\+)?\}", r"(?P<\1>[^/]+)", path)
        found.append((http["method"], re.compile(f"{pattern}/?"), name))
    return tuple(found)


@cache
def model_of(service: str, operation: str) -> OperationModel:
    return get_service_model(service).operation_model(operation)


def _by_path(service: str, environ: Environ) -> tuple[str, dict[str, str]]:
    for method, pattern, name in _operations(service):
        if environ["REQUEST_METHOD"] == method and (match := pattern.fullmatch(environ.get("PATH_INFO", "/"))):
            return name, {key: unquote(value) for key, value in match.groupdict().items()}
    return "", {}


def read_call(environ: Environ, parsed: frozenset[tuple[str, str]], by_path: frozenset[str]) -> Call | None:
    """A signed request; None for all others. `parsed`: operations whose parameters are wanted; `by_path`: services with
    REST that have some."""
    scope = CREDENTIAL.search(environ.get("HTTP_AUTHORIZATION", ""))
    if not scope:
        return None
    access_key, region, signed_for = scope.groups()
    service = SIGNING_NAMES.get(signed_for, signed_for)
    body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    environ["wsgi.input"] = io.BytesIO(body)
    call = Call(service, "", region, access_key, environ, body)
    in_path: dict[str, str] = {}
    form = call.form if "form-urlencoded" in environ.get("CONTENT_TYPE", "") else {}
    operation = form.get("Action") or environ.get("HTTP_X_AMZ_TARGET", "").rpartition(".")[2]
    if not operation and service in by_path:
        operation, in_path = _by_path(service, environ)
    params = _parse(service, operation, form, in_path, body) if (service, operation) in parsed else {}
    return Call(service, operation, region, access_key, environ, body, params)


def _parse(service: str, operation: str, form: Mapping[str, str], in_path: Mapping[str, str], body: bytes) -> Any:
    model = model_of(service, operation)
    request: Any = {
        "method": "POST",
        "values": form,
        "headers": {},
        "body": body,
        "url_path": "/",
        "url_params": in_path,
    }
    return PROTOCOL_PARSERS[model.service_model.protocol](model).parse(request) or {}


def amended(call: Call, form: Mapping[str, str | None]) -> Call:
    fields = {key: value for key, value in {**call.form, **form}.items() if value is not None}
    body = urlencode(fields).encode()
    environ = {**call.environ, "wsgi.input": io.BytesIO(body), "CONTENT_LENGTH": str(len(body))}
    return Call(call.service, fields["Action"], call.region, call.access_key, environ, body)


def read_answer(call: Call, answer: Answer) -> dict[str, Any]:
    status, headers, body = answer
    if status >= 500 and b"<html" in body[:200].lower():
        raise Refused(NOT_IN_THIS_CLOUD, f"Neither moto nor lab/cloud knows {call.service} {call.operation} so.")
    model = model_of(call.service, call.operation)
    response = {"status_code": status, "headers": dict(headers), "body": body, "context": {}}
    read: dict[str, Any] = create_parser(model.service_model.protocol).parse(response, model.output_shape)
    read.pop("ResponseMetadata", None)
    if status >= 300:
        raise Refused(read["Error"]["Code"], read["Error"].get("Message", ""))
    return read


def write_answer(call: Call, answer: Mapping[str, Any] | Exception) -> Answer:
    model = model_of(call.service, call.operation)
    if not isinstance(answer, Exception) and model.output_shape is not None:
        wrong = ParamValidator().validate(answer, model.output_shape)
        if wrong.has_errors():
            raise TypeError(f"{call.operation} has no such answer: {wrong.generate_report()}")
    protocol = determine_request_protocol(model.service_model, call.environ.get("CONTENT_TYPE", ""))
    written = get_serializer_class(call.service, protocol)(model).serialize(answer)
    status = (answer.status if isinstance(answer, Refused) else None) or written["status_code"]
    body = written["body"]
    return status, list(written["headers"].items()), body.encode() if isinstance(body, str) else body
