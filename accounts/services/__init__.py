"""Changes to accounts, one noun a file."""

from accounts.services.token import token_create, token_revoke
from accounts.services.user import operator_ensure

__all__ = ["operator_ensure", "token_create", "token_revoke"]
