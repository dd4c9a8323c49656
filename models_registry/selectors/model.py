"""Models and their versions as readers see them, in a number of queries that does not grow with their number."""

from django.db.models import Prefetch, QuerySet

from models_registry.models import Model, ModelVersion


def models_described() -> QuerySet[Model]:
    """Models with their versions, newest first: two queries."""
    versions = ModelVersion.objects.order_by("-id")
    return Model.objects.prefetch_related(Prefetch("versions", queryset=versions))


def version_by_reference(versions: QuerySet[ModelVersion], reference: str) -> ModelVersion | None:
    """The version that `model@version` names, or None."""
    model, _, version = reference.partition("@")
    return versions.filter(model_id=model, version=version).first()
