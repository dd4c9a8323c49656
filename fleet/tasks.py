"""Celery's way into the fleet's services."""

from celery import shared_task

from fleet.services.reconcile import reconcile


@shared_task(name="fleet.reconcile")
def reconcile_fleet() -> None:
    reconcile()
