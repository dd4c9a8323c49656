"""Every URL that web answers, except the two WebSockets (controlplane.asgi)."""

from django.urls import URLPattern, URLResolver

urlpatterns: list[URLPattern | URLResolver] = []
