"""The playground's page, and the one address that its chat speaks to. The browser speaks to web, web to the ingress."""

from asgiref.sync import sync_to_async
from django.conf import settings
from django.http import HttpRequest, HttpResponseBase, JsonResponse, StreamingHttpResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_POST

from audit.middleware import audit_exempt
from controlplane.dashboard.fragments import Asked, Fragment, Page
from controlplane.dashboard.playground.question import Question, question_in
from controlplane.dashboard.playground.relay import chat_refusal, relay_chat
from controlplane.dashboard.selectors.playground import Playground, playground
from fleet.models import Deployment
from kernel.access import Role, access_of
from kernel.refusals import InvalidInput
from traffic.planning.key import PLAYGROUND_TENANT, internal_key_text
from traffic.selectors.async_request import ingress_addresses_by_region
from traffic.selectors.key import key_standing


def _playground(asked: Asked) -> Playground:
    return playground(asked.word("deployment"))


PLAYGROUND = Page(
    section="playground",
    title="Playground",
    # Without topics: a chat that is under way is never fetched again.
    fragments=(Fragment("playground", "", (), "dashboard/playground/chat.html", _playground),),
)


@never_cache
@require_POST
@audit_exempt("a chat asks a cell, as applications do, and changes nothing that operators run")
async def playground_say(request: HttpRequest) -> HttpResponseBase:
    """Answers with events while the cell generates (controlplane.dashboard.playground.relay)."""
    user = await request.auser()
    if not user.is_authenticated:
        return _refused(401, "your session has ended; log in again")
    try:
        question = question_in(request.body)
        if not await sync_to_async(_may_ask)(request, question.deployment):
            return _refused(403, f"to ask {question.deployment} takes the role {Role.OPERATOR}")
        address, headers = await sync_to_async(_target)(question)
    except InvalidInput as wrong:
        return _refused(400, str(wrong))
    if refusal := chat_refusal(user.get_username()):
        return _refused(429, refusal)
    events = relay_chat(user.get_username(), address, question.body(), headers)
    # A proxy in front must not collect what should arrive piece by piece.
    return StreamingHttpResponse(events, content_type="text/event-stream", headers={"X-Accel-Buffering": "no"})


def _may_ask(request: HttpRequest, deployment: str) -> bool:
    """Answers cost capacity that applications pay for, so looking at the fleet is not enough."""
    return access_of(request).may(Role.OPERATOR, deployment)


def _target(question: Question) -> tuple[tuple[str, int], dict[str, str]]:
    """The ingress, and the key to show: the application's that the user named, else ours where one is required."""
    if not Deployment.objects.filter(name=question.deployment).exists():
        raise InvalidInput(field="deployment", rule="exists", message=f"there is no deployment {question.deployment!r}")
    ingresses = ingress_addresses_by_region().get(question.region)
    if not ingresses:
        raise InvalidInput(field="region", rule="exists", message=f"region {question.region!r} has no ingress")
    key = question.key
    if not key and key_standing().required:
        key = internal_key_text(PLAYGROUND_TENANT, settings.SECRET_KEY)
    return ingresses[0], {"Authorization": f"Bearer {key}"} if key else {}


def _refused(status: int, message: str) -> JsonResponse:
    return JsonResponse({"message": message}, status=status)
