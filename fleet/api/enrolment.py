"""`POST /agents/enrol`: an agent exchanges its join token for a credential."""

import json

from django.http import HttpRequest, JsonResponse
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from fleet.services.enrolment import EnrolmentRefused, agent_enrol
from kernel import clock

MAX_BODY_BYTES = 4096


@csrf_exempt  # agents carry a token, never a cookie
@require_POST
def enrol(request: HttpRequest) -> JsonResponse:
    """200 {"credential"}; 400: the body is no enrolment; 401: no token; 403: the token does not allow it."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not token:
        return JsonResponse({"error": "send the join token as 'Authorization: Bearer <token>'"}, status=401)
    try:
        body = json.loads(request.body) if len(request.body) <= MAX_BODY_BYTES else None
        kind, subject = body["kind"], body["id"]  # type: ignore[index]
    except (ValueError, KeyError, TypeError, RecursionError):
        return JsonResponse({"error": 'the body must be {"kind": "node" or "ingress", "id": "…"}'}, status=400)
    try:
        credential = agent_enrol(token=token.strip(), kind=str(kind), subject=str(subject), now=clock.now())
    except EnrolmentRefused as refusal:
        return JsonResponse({"error": str(refusal)}, status=403)
    return JsonResponse({"credential": credential})
