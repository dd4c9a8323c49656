"""The install's name in clouds, and whether it may change anything there."""

import secrets
from datetime import datetime, timedelta

from fleet.models import Install
from fleet.planning.ownership import stale_reason
from fleet.providers.base import Later

DRY_RUN = timedelta(days=1)
"""On an install's first day garbage collection logs what it would delete, and deletes nothing."""
READ_ONLY_RETRY_S = 60.0


def install_ensure(now: datetime) -> Install:
    """The row of this control plane; made with a name of its own when a cloud is used first."""
    found = Install.objects.first()
    if found is not None:
        return found
    new = {"id": f"sw-{secrets.token_hex(6)}", "created_at": now, "dry_run_until": now + DRY_RUN}
    return Install.objects.get_or_create(only=True, defaults=new)[0]


def install_that_may_change(now: datetime) -> Install:
    """The same, of one that holds its clouds.

    Raises:
        Later: it is read-only.
    """
    install = install_ensure(now)
    reason = install.read_only or stale_reason(install.beat_at, now)
    if reason:
        raise Later(f"nothing is launched or ended: {reason}", READ_ONLY_RETRY_S)
    return install
