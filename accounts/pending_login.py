"""A login whose password was right and whose second factor is still to be shown, in a signed cookie that is sent to
that page alone. It is no session and opens nothing; a new password, or five minutes, end it."""

from dataclasses import astuple, dataclass
from datetime import datetime

from django.conf import settings
from django.contrib.auth.models import User
from django.core import signing
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils.crypto import constant_time_compare

LASTS_S = 300
_SALT = "accounts.pending_login"


@dataclass(frozen=True, slots=True)
class PendingLogin:
    """`proof`: of the password that was right. `method`: how it was, as sessions name it. `wanted`: where it leads."""

    user_id: int
    proof: str
    method: str
    wanted: str
    began_s: float


def pending_begin(response: HttpResponse, user: User, method: str, wanted: str, now: datetime) -> None:
    pending = PendingLogin(user.pk, user.get_session_auth_hash(), method, wanted, now.timestamp())
    response.set_cookie(
        settings.PENDING_COOKIE_NAME,
        signing.dumps(astuple(pending), salt=_SALT),
        max_age=LASTS_S,
        path=reverse("login-second"),
        httponly=True,
        samesite="Lax",
        secure=settings.SESSION_COOKIE_SECURE,
    )


def pending_end(response: HttpResponse) -> None:
    response.delete_cookie(settings.PENDING_COOKIE_NAME, path=reverse("login-second"), samesite="Lax")


def pending_of(request: HttpRequest, now: datetime) -> tuple[User, PendingLogin] | None:
    """Whose password was right in this browser a moment ago; None for all others."""
    try:
        pending = PendingLogin(*signing.loads(request.COOKIES.get(settings.PENDING_COOKIE_NAME, ""), salt=_SALT))
    except (signing.BadSignature, ValueError, TypeError):
        return None
    user = User.objects.filter(pk=pending.user_id, is_active=True).first()
    if user is None or not 0 <= now.timestamp() - pending.began_s <= LASTS_S:
        return None
    return (user, pending) if constant_time_compare(user.get_session_auth_hash(), pending.proof) else None
