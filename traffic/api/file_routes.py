"""What applications may ask of files, below /v1/files/."""

from django.urls import path

from traffic.api.stored_file import content, detail, unknown_path

urlpatterns = [
    path("<str:file_id>", detail, name="file"),
    path("<str:file_id>/content", content, name="file-content"),
    path("<path:rest>", unknown_path, name="file-unknown-path"),
]
