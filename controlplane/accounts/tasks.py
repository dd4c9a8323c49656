"""Periodic work on accounts."""

from celery import shared_task

from controlplane.accounts.services.approval import approvals_expire
from controlplane.kernel import clock


@shared_task(name="accounts.expire_approvals")
def expire_approvals() -> None:
    approvals_expire(now=clock.now())
