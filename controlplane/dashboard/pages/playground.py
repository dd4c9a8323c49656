"""The playground: its page, and the endpoint that streams a chat through the ingress to the browser."""

from dataclasses import dataclass

from asgiref.sync import sync_to_async
from django.conf import settings
from django.db.models import Count, Q
from django.http import HttpRequest, HttpResponseBase, JsonResponse, StreamingHttpResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_POST

from audit.middleware import audit_exempt
from controlplane.dashboard.fragments import Fragment, Page, PageRequest
from controlplane.dashboard.playground.request import ChatRequest, parse_chat_request
from controlplane.dashboard.playground.stream import chat_limit_reached, stream_chat
from fleet.models import Deployment
from fleet.planning.states import CellState
from kernel.access import Role, access_of
from kernel.refusals import InvalidInput
from traffic.planning.key import playground_key_text
from traffic.planning.routing import IngressAddress
from traffic.selectors.async_request import ingress_addresses_by_region
from traffic.selectors.key import key_standing


@dataclass(frozen=True, slots=True)
class DeploymentOption:
    name: str
    ready: int


@dataclass(frozen=True, slots=True)
class Playground:
    """`chosen`: the deployment that the page's URL names, else the first with a ready cell."""

    deployments: tuple[DeploymentOption, ...]
    regions: tuple[str, ...]
    keys_required: bool
    chosen: str


def _playground(request: PageRequest) -> Playground:
    ready = Count("cells", filter=Q(cells__state=CellState.READY.value))
    rows = Deployment.objects.annotate(ready=ready).order_by("name").values_list("name", "ready")
    options = tuple(DeploymentOption(name, count) for name, count in rows)
    first = next((option.name for option in options if option.ready), "")
    return Playground(
        deployments=options,
        regions=tuple(sorted(ingress_addresses_by_region())),
        keys_required=key_standing().required,
        chosen=request.text("deployment") or first,
    )


PLAYGROUND = Page(
    section="playground",
    title="Playground",
    # Without topics: a running chat is never refetched.
    fragments=(Fragment("playground", "", (), "dashboard/playground/chat.html", _playground),),
)


@never_cache
@require_POST
@audit_exempt("a chat reaches a cell as an application's request does, and changes nothing that operators run")
async def playground_chat(request: HttpRequest) -> HttpResponseBase:
    """Streams events while the cell generates (controlplane.dashboard.playground.stream)."""
    user = await request.auser()
    if not user.is_authenticated:
        return _error(401, "your session has ended; log in again")
    try:
        chat = parse_chat_request(request.body)
        if not await sync_to_async(_may_chat)(request, chat.deployment):
            return _error(403, f"chatting with {chat.deployment} needs the {Role.OPERATOR} role")
        ingress, headers = await sync_to_async(_ingress)(chat)
    except InvalidInput as invalid:
        return _error(400, str(invalid))
    if message := chat_limit_reached(user.get_username()):
        return _error(429, message)
    events = stream_chat(user.get_username(), ingress, chat.body(), headers)
    # A proxy in front must not buffer the stream.
    return StreamingHttpResponse(events, content_type="text/event-stream", headers={"X-Accel-Buffering": "no"})


def _may_chat(request: HttpRequest, deployment: str) -> bool:
    """Generation costs capacity that applications pay for, so read access is not enough."""
    return access_of(request).may(Role.OPERATOR, deployment)


def _ingress(chat: ChatRequest) -> tuple[IngressAddress, dict[str, str]]:
    """The ingress, and the headers: with the user's key, else, where keys are required, the internal one."""
    if not Deployment.objects.filter(name=chat.deployment).exists():
        raise InvalidInput(field="deployment", rule="exists", message=f"there is no deployment {chat.deployment!r}")
    ingresses = ingress_addresses_by_region().get(chat.region)
    if not ingresses:
        raise InvalidInput(field="region", rule="exists", message=f"region {chat.region!r} has no ingress")
    key = chat.key
    if not key and key_standing().required:
        key = playground_key_text(settings.SECRET_KEY)
    return ingresses[0], {"Authorization": f"Bearer {key}"} if key else {}


def _error(status: int, message: str) -> JsonResponse:
    return JsonResponse({"message": message}, status=status)
