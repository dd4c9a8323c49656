"""What a machine of EC2 asks before it joins: the script that proves which machine it is, and the ticket that its proof
buys. With that it joins as every host does (`fleet.api.join`). Neither answers to a browser or a user.
"""

from pathlib import Path

from django.conf import settings
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.template.loader import render_to_string
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_GET, require_POST

from fleet.api.join import ORIGIN
from fleet.planning.attestation import BadProof, ProofRefused
from fleet.providers.aws.caller_identity import sts_host
from fleet.selectors.trust import server_pin
from fleet.services.attestation import RETRY_AFTER_S, NotYet, machine_attest
from fleet.services.machine import join_refused
from kernel import clock
from kernel.addresses import client_network
from kernel.outside import done_outside
from kernel.rest.throttling import count_request

ATTESTATIONS_PER_MIN = 3000
"""Of one network: a thousand machines may come out of one NAT at once, and again after a pause."""


@require_GET
def script(request: HttpRequest) -> HttpResponse:
    """`GET /join/aws`: the shell script that user data fetches and runs. 200 text; 400 where the host is odd."""
    origin = f"{request.scheme}://{request.get_host()}"
    if not ORIGIN.fullmatch(origin):
        return HttpResponse("the name of the server has characters that none has\n", status=400)
    program = (Path(settings.BASE_DIR) / "templates/aws/attest.py").read_text(encoding="utf-8")
    context = {"server": origin, "pin": server_pin(clock.now()), "sts_host": sts_host("REGION"), "attest": program}
    return HttpResponse(render_to_string("aws/join.sh", context), content_type="text/x-shellscript; charset=utf-8")


@csrf_exempt  # machines carry a proof, never a cookie
@require_POST
def attest(request: HttpRequest) -> HttpResponse:
    """`POST /agents/join/attest` {"unit", "address", "headers"}: a machine's proof. 200 {"ticket"}; 400: it is none;
    403: it proves nothing to us; 411: it does not say how long it is; 429: too many of one network; 503 with
    Retry-After: it cannot be judged now."""
    network = client_network(str(request.META.get("REMOTE_ADDR", "")))
    rate = done_outside("rate", lambda: count_request("attest", network, ATTESTATIONS_PER_MIN))
    if rate is not None and rate.count > rate.limit:
        return _answer("too many proofs from one network; try again in a minute", 429, rate.reset_s)
    if "HTTP_TRANSFER_ENCODING" in request.META:
        return _answer("say how long the proof is, by Content-Length", 411)
    now = clock.now()
    try:
        return JsonResponse({"ticket": machine_attest(request.body, now=now)})
    except BadProof as bad:
        return _answer(str(bad), 400)
    except NotYet as missing:
        return _answer(str(missing), 503, RETRY_AFTER_S)
    except ProofRefused as refusal:
        join_refused(token="", address=network, reason=str(refusal), now=now)
        return _answer(str(refusal), 403)


def _answer(error: str, status: int, retry_after_s: int | None = None) -> HttpResponse:
    headers = {"Retry-After": str(retry_after_s)} if retry_after_s is not None else {}
    return JsonResponse({"error": error}, status=status, headers=headers)
