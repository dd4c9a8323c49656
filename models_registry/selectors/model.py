"""Models and their versions as readers see them, in a number of queries that does not grow with their number."""

from django.db.models import Prefetch, QuerySet

from kernel.refusals import InvalidInput
from models_registry.models import Model, ModelVersion, Validation

_LAST = "last_validations"


def models_described() -> QuerySet[Model]:
    """Models with their versions, newest first: two queries."""
    versions = ModelVersion.objects.order_by("-id")
    return Model.objects.prefetch_related(Prefetch("versions", queryset=versions))


def versions_described() -> QuerySet[ModelVersion]:
    """Versions, each with its last validation (see `latest_validation`): two queries."""
    last = Validation.objects.order_by("-id").defer("checked")[:1]
    return ModelVersion.objects.prefetch_related(Prefetch("validations", queryset=last, to_attr=_LAST))


def latest_validation(version: ModelVersion) -> Validation | None:
    """The last validation of a version of `versions_described`, None before the first one."""
    return next(iter(getattr(version, _LAST)), None)


def version_by_reference(versions: QuerySet[ModelVersion], reference: str) -> ModelVersion | None:
    """The version that `model@version` names, or None."""
    model, _, version = reference.partition("@")
    return versions.filter(model_id=model, version=version).first()


def version_stated(reference: str, *, field: str, versions: QuerySet[ModelVersion] | None = None) -> ModelVersion:
    """The version that a request names in this field, of `versions` or of all.

    Raises:
        InvalidInput: there is none.
    """
    version = version_by_reference(ModelVersion.objects.all() if versions is None else versions, reference)
    if version is None:
        message = f"there is no model version {reference!r}; it reads model@version"
        raise InvalidInput(field=field, rule="exists", message=message)
    return version
