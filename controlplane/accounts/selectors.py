"""Finds API tokens by what a caller presents. One indexed look-up; the hash proves the rest."""

from controlplane.accounts.models import ApiToken
from controlplane.kernel.secrets import secret_matches, secret_prefix


def token_by_text(text: str) -> ApiToken | None:
    """The token with this text, its user loaded. It may be revoked or expired: ask `ApiToken.refusal`."""
    prefix = secret_prefix(text)
    if prefix is None:
        return None
    token = ApiToken.objects.select_related("user").filter(prefix=prefix).first()
    return token if token is not None and secret_matches(text, token.digest) else None
