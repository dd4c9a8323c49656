"""Who acts, as records name him: the user of a request's session or token, the owner of a token that no longer opens
anything, or the account that runs a command. Anonymous requests have no actor."""

import getpass
import os

from django.apps import apps
from django.contrib.auth import get_user
from django.http import HttpRequest

from audit.models import Proof
from audit.services.record import Actor
from kernel.secrets import secret_prefix


def request_actor(request: HttpRequest) -> Actor | None:
    """Who sent a request; None if that is unknown."""
    address = str(request.META.get("REMOTE_ADDR") or "")
    prefix = _token_prefix(request)
    user = getattr(request, "user", None)
    if user is not None and user.is_authenticated:
        proof = Proof.TOKEN if getattr(request, "auth", None) is not None else Proof.SESSION
        return Actor(user.get_username(), proof, address, prefix if proof is Proof.TOKEN else "")
    if prefix:
        return _token_owner(prefix, address)
    # To the API a session without its CSRF token is anonymous, but the record is of its user.
    user = get_user(request) if hasattr(request, "session") else None
    return Actor(user.get_username(), Proof.SESSION, address) if user is not None and user.is_authenticated else None


def command_actor() -> Actor:
    """The account that runs this process, and the machine."""
    try:
        account = getpass.getuser()
    except (KeyError, OSError):
        account = f"uid {os.getuid()}"
    return Actor(account, Proof.COMMAND, os.uname().nodename)


def _token_owner(prefix: str, address: str) -> Actor | None:
    token = apps.get_model("accounts", "ApiToken").objects.select_related("user").filter(prefix=prefix).first()
    if token is not None:
        return Actor(token.user.get_username(), Proof.TOKEN, address, prefix)
    for model in ("JoinToken", "AgentCredential"):
        known = apps.get_model("fleet", model).objects.filter(prefix=prefix).first()
        if known is not None:
            return Actor(known.subject, Proof.JOIN_TOKEN, address, prefix)
    if apps.get_model("fleet", "Invitation").objects.filter(prefix=prefix).exists():
        return Actor(f"invitation-{prefix}", Proof.JOIN_TOKEN, address, prefix)
    return None


def _token_prefix(request: HttpRequest) -> str:
    scheme, _, text = request.headers.get("Authorization", "").partition(" ")
    prefix = secret_prefix(text.strip()) if scheme.casefold() == "bearer" else None
    return (prefix or "").replace("\x00", "")[:16]
