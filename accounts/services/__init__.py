"""Changes to accounts, one noun a file."""

from accounts.services.operator import operator_ensure
from accounts.services.token import token_create, token_revoke

__all__ = ["operator_ensure", "token_create", "token_revoke"]
