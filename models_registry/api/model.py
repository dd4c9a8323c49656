"""Models over HTTP: create, read, describe and delete them. Decides nothing; services do."""

from django.db.models import QuerySet
from django_filters import rest_framework as filters
from drf_spectacular.utils import extend_schema, extend_schema_field
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from kernel import clock
from kernel.rest.serializers import StrictSerializer, actor_of
from kernel.rest.view_sets import ReadOnlyModelViewSet
from models_registry.models import Model
from models_registry.selectors.model import models_described
from models_registry.services.draft import model_change, model_create, model_delete


class ModelSerializer(serializers.ModelSerializer[Model]):
    versions = serializers.SerializerMethodField(help_text="`model@version`, newest first.")

    class Meta:
        model = Model
        fields = ["name", "description", "versions", "created_at"]
        examples = {"name": "smollm2"}

    @extend_schema_field(serializers.ListField(child=serializers.CharField()))
    def get_versions(self, model: Model) -> list[str]:
        return [version.reference for version in model.versions.all()]


class CreateModelSerializer(StrictSerializer):
    name = serializers.SlugField(max_length=96, help_text="What applications ask for.")
    description = serializers.CharField(max_length=2000, required=False, allow_blank=True, default="")

    class Meta:
        examples = {"name": "smollm2", "description": "SmolLM2 135M Instruct"}


class ChangeModelSerializer(StrictSerializer):
    description = serializers.CharField(max_length=2000, allow_blank=True)


class ModelFilter(filters.FilterSet):
    engine = filters.CharFilter(
        field_name="versions__engine", distinct=True, help_text="Has a version for this engine."
    )

    class Meta:
        model = Model
        fields: list[str] = []


class ModelViewSet(ReadOnlyModelViewSet[Model]):
    """What answers prompts, under the name that applications ask for."""

    serializer_class = ModelSerializer
    filterset_class = ModelFilter
    lookup_field = "name"
    lookup_value_regex = r"[-\w.:@+]+"
    ordering_fields = ("name", "created_at")
    watch_kind = "model"
    needs_if_match = frozenset({"destroy"})
    columns = "NAME, VERSIONS, DESCRIPTION, AGE=created_at:age"

    def get_queryset(self) -> QuerySet[Model]:
        return models_described()

    @extend_schema(operation_id="models_create", request=CreateModelSerializer, responses={200: ModelSerializer})
    def create(self, request: Request) -> Response:
        """Add a model; its versions come one by one. 409 if the name is taken."""
        body = CreateModelSerializer(data=request.data)
        body.is_valid(raise_exception=True)
        model = model_create(actor=actor_of(request), now=clock.now(), **body.validated_data)
        return Response(ModelSerializer(self.get_queryset().get(pk=model.pk)).data)

    @extend_schema(operation_id="models_change", request=ChangeModelSerializer, responses={200: ModelSerializer})
    def partial_update(self, request: Request, name: str) -> Response:
        """Change the description of a model. Its name never changes."""
        model = self.get_object()
        body = ChangeModelSerializer(data=request.data)
        body.is_valid(raise_exception=True)
        model_change(name=model.name, actor=actor_of(request), now=clock.now(), **body.validated_data)
        return Response(ModelSerializer(self.get_object()).data)

    @extend_schema(operation_id="models_delete", responses={200: ModelSerializer})
    def destroy(self, request: Request, name: str) -> Response:
        """Remove a model without versions. Answers what it was. 409 while it has versions: drafts can be deleted, all
        others are retired and stay readable."""
        model = self.get_object()
        shown = ModelSerializer(model).data
        model_delete(name=model.name, actor=actor_of(request), now=clock.now())
        return Response(shown)
