"""Celery tasks of accounts. Each calls one service and decides nothing."""

from celery import shared_task

from accounts.services.approval import approvals_expire
from kernel import clock


@shared_task(name="accounts.expire_approvals")
def expire_approvals() -> None:
    approvals_expire(now=clock.now())
