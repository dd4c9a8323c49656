"""Providers of machines, by the name that regions use. `README.md` says what one promises and how to add one."""

from collections.abc import Mapping
from typing import cast

from django.utils.module_loading import import_string

from fleet.providers.base import EmbeddedProvider, NodeProvider, ProviderError

PROVIDERS: Mapping[str, str] = {
    "aws": "fleet.providers.aws.provider.AwsProvider",
    "local": "fleet.providers.local.provider.LocalProvider",
    "machines": "fleet.providers.machines.provider.MachinesProvider",
}
"""Name -> class. A class is imported when it is first used, so that an unused one needs none of its libraries."""
EMBEDDED = ("local",)
"""Of these, the ones whose machines are processes of this computer."""


def provider_named(name: str) -> NodeProvider:
    """The provider of a region.

    Raises:
        ProviderError: there is no such provider.
    """
    if name not in PROVIDERS:
        raise ProviderError(f"unknown provider {name!r}; there is: {', '.join(sorted(PROVIDERS))}")
    return cast(NodeProvider, import_string(PROVIDERS[name]).from_settings())


def embedded_providers() -> list[EmbeddedProvider]:
    """The providers whose machines are processes of this computer: `make down` stops them, `make up` boots them. No
    other one is imported for that."""
    return [cast(EmbeddedProvider, provider_named(name)) for name in EMBEDDED]
