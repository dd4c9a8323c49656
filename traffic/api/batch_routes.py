"""What applications may ask of batches, below /v1/batches/."""

from django.urls import path

from traffic.api.batch import cancel, detail, unknown_path

urlpatterns = [
    path("<str:batch_id>", detail, name="batch"),
    path("<str:batch_id>/cancel", cancel, name="batch-cancel"),
    path("<path:rest>", unknown_path, name="batch-unknown-path"),
]
