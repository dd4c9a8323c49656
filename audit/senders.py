"""Who sends a request, as records name him: the user of its session or token, or the owner of a token that no longer
opens anything. Of strangers it knows nothing."""

from django.apps import apps
from django.contrib.auth import get_user
from django.http import HttpRequest

from audit.models import Proof
from audit.services.record import Actor
from kernel.secrets import secret_prefix


def sender_of(request: HttpRequest) -> Actor | None:
    """The sender; None for a stranger."""
    address = str(request.META.get("REMOTE_ADDR") or "")
    prefix = _prefix(request)
    user = getattr(request, "user", None)
    if user is not None and user.is_authenticated:
        proof = Proof.TOKEN if getattr(request, "auth", None) is not None else Proof.SESSION
        return Actor(user.get_username(), proof, address, prefix if proof is Proof.TOKEN else "")
    if prefix:
        return _owner(prefix, address)
    # A session without its CSRF token is nobody to the API, but the record is of its user.
    user = get_user(request) if hasattr(request, "session") else None
    return Actor(user.get_username(), Proof.SESSION, address) if user is not None and user.is_authenticated else None


def _owner(prefix: str, address: str) -> Actor | None:
    token = apps.get_model("accounts", "ApiToken").objects.select_related("user").filter(prefix=prefix).first()
    if token is not None:
        return Actor(token.user.get_username(), Proof.TOKEN, address, prefix)
    joining = apps.get_model("fleet", "JoinToken").objects.filter(prefix=prefix).first()
    return Actor(joining.subject, Proof.JOIN_TOKEN, address, prefix) if joining is not None else None


def _prefix(request: HttpRequest) -> str:
    scheme, _, text = request.headers.get("Authorization", "").partition(" ")
    found = secret_prefix(text.strip()) if scheme.casefold() == "bearer" else None
    return (found or "").replace("\x00", "")[:16]
