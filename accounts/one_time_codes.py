"""One-time codes of authenticator apps (RFC 6238), and recovery codes. Pure, except for randomness.

The secret of an app is encrypted with the key of this control plane, for one user: a reader of the database alone
cannot make codes, and a row that is moved to another user is useless."""

import base64
import json
import secrets
from datetime import datetime

import pyotp
import segno
from cryptography.fernet import Fernet, InvalidToken
from django.utils.crypto import constant_time_compare, salted_hmac

STEP_S = 30
"""Used by all common apps, like six digits and SHA-1, the defaults of RFC 6238."""
DRIFT_STEPS = 1
"""How far an app's clock may be off, either way (RFC 6238, 5.2)."""
ENROL_WITHIN_S = 600
"""Time limit from showing a secret to the first code of its app."""
RECOVERY_CODES = 10
_LETTERS = "abcdefghijkmnpqrstuvwxyz23456789"
"""32 letters and digits without look-alikes, so sixteen of them have 80 bits."""
_GROUPS, _GROUP = 4, 4


def app_secret() -> str:
    """Returns a new secret of 160 bits in base32."""
    return pyotp.random_base32()


def encrypted_secret(secret: str, user_id: int, now: datetime) -> str:
    """Encrypts a secret for the database and for forms."""
    return _box().encrypt_at_time(json.dumps([user_id, secret]).encode(), int(now.timestamp())).decode()


def decrypted_secret(text: str, user_id: int) -> str:
    """Returns the secret, or "" if it belongs to another user or was encrypted with another key."""
    try:
        owner, secret = json.loads(_box().decrypt(text.encode()))
    except (InvalidToken, ValueError, TypeError):
        return ""
    return str(secret) if owner == user_id else ""


def is_recent(text: str, now: datetime) -> bool:
    """Whether a secret was encrypted within `ENROL_WITHIN_S`."""
    try:
        return now.timestamp() - _box().extract_timestamp(text.encode()) <= ENROL_WITHIN_S
    except (InvalidToken, ValueError):
        return False


def matching_step(secret: str, code: str, now: datetime, after: int) -> int | None:
    """Returns the time step of this code, among the current ones after the last used step."""
    current = int(now.timestamp()) // STEP_S
    app = pyotp.TOTP(secret, interval=STEP_S)
    steps = range(current - DRIFT_STEPS, current + DRIFT_STEPS + 1)
    return next((step for step in steps if step > after and constant_time_compare(app.generate_otp(step), code)), None)


def provisioning_uri(secret: str, username: str, host: str) -> str:
    """Returns the URL that an app reads from the QR code."""
    return pyotp.TOTP(secret, interval=STEP_S).provisioning_uri(name=username, issuer_name=f"Switchyard {host}")


def qr_code(text: str) -> str:
    """Returns a QR code as inline SVG: without styles, black on white in every theme."""
    return segno.make(text, error="m", micro=False).svg_inline(border=4, light="white", omitsize=True)


def recovery_codes() -> tuple[str, ...]:
    return tuple(
        "-".join("".join(secrets.choice(_LETTERS) for _ in range(_GROUP)) for _ in range(_GROUPS))
        for _ in range(RECOVERY_CODES)
    )


def typed(code: str) -> str:
    """Removes separators that people type within a code."""
    return "".join(letter for letter in code[:64].casefold() if letter.isascii() and letter.isalnum())


def _box() -> Fernet:
    return Fernet(base64.urlsafe_b64encode(salted_hmac("accounts.one_time_codes", "", algorithm="sha256").digest()))
