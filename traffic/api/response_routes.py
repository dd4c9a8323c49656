"""What applications may ask of kept responses, below /v1/responses/. Creating one is `response_create`."""

from django.urls import path

from traffic.api.stored_response import cancel, detail, input_items, unknown_path

urlpatterns = [
    path("<str:response_id>", detail, name="response"),
    path("<str:response_id>/cancel", cancel, name="response-cancel"),
    path("<str:response_id>/input_items", input_items, name="response-input-items"),
    path("<path:rest>", unknown_path, name="response-unknown-path"),
]
