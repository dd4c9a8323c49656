"""Who asked, as event rows name them."""

from rest_framework.request import Request

from controlplane.kernel.models import Event

_LONGEST = Event._meta.get_field("actor").max_length


def actor_of(request: Request) -> str:
    """The user's name, cut to what an event row holds."""
    return request.user.get_username()[:_LONGEST]
