"""Changes to accounts, one noun a file."""

from controlplane.accounts.services.operator import operator_ensure
from controlplane.accounts.services.token import token_create, token_revoke

__all__ = ["operator_ensure", "token_create", "token_revoke"]
