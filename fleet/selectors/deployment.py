"""Deployments with their version and the regions they should serve in, in two queries."""

from django.db.models import Prefetch, QuerySet

from fleet.models import Deployment, DeploymentRegion


def deployments_described() -> QuerySet[Deployment]:
    """Deployments with their model version and, in the order of names, their regions."""
    regions = DeploymentRegion.objects.order_by("region_id")
    return Deployment.objects.select_related("model_version").prefetch_related(Prefetch("regions", queryset=regions))
