"""Providers of machines, by the name that regions use."""

from django.conf import settings

from fleet.providers.base import NodeProvider, ProviderError
from fleet.providers.local import LocalProvider


def provider_named(name: str) -> NodeProvider:
    """The provider of a region.

    Raises:
        ProviderError: there is no such provider.
    """
    if name == LocalProvider.name:
        return local_provider()
    raise ProviderError(f"unknown provider {name!r}; there is: {LocalProvider.name}")


def local_provider() -> LocalProvider:
    """Machines as processes of this computer, in this home."""
    return LocalProvider(
        home=settings.SWITCHYARD_HOME,
        checkout=settings.BASE_DIR,
        server_url=settings.SWITCHYARD_URL,
        first_port=settings.SWITCHYARD_NODE_PORTS,
    )
