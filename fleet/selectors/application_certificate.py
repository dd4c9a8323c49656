"""Certificates for applications: which a region's ingresses show, and as they get them, with their keys."""

import base64
import hashlib
import json
from collections import defaultdict

from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from django.conf import settings
from django.db.models import F, Q, QuerySet
from django.utils.crypto import salted_hmac

from engine_agent.protocol.ingress_messages import ApplicationTls, ServerCertificate
from fleet.models import ApplicationCertificate, Region

SALT = "fleet.application-certificate"


class KeySealedAway(Exception):
    """A private key cannot be opened with this SECRET_KEY; the text names its certificate."""


def key_box() -> MultiFernet:
    """What seals private keys, under the SECRET_KEY of now; it opens those that one of before sealed."""
    secrets = (settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS)
    keys = (salted_hmac(SALT, "", secret=secret, algorithm="sha256").digest() for secret in secrets)
    return MultiFernet([Fernet(base64.urlsafe_b64encode(key)) for key in keys])


def certificates_of(region: str) -> QuerySet[ApplicationCertificate]:
    """Those that a region's ingresses show: its own first, the oldest first. The first is shown where none fits."""
    shown = ApplicationCertificate.objects.filter(Q(region=region) | Q(region=None))
    return shown.order_by(F("region_id").asc(nulls_last=True), "id")


def tls_versions() -> dict[str, str]:
    """Region -> what tells one `application_tls` of it from another."""
    own: dict[str | None, list[tuple[str, str]]] = defaultdict(list)
    for name, region, digest in ApplicationCertificate.objects.values_list("name", "region_id", "digest"):
        own[region].append((name, digest))
    return {
        region: hashlib.sha256(json.dumps([plain_http, own[region], own[None]]).encode()).hexdigest()[:16]
        for region, plain_http in Region.objects.values_list("name", "plain_http")
    }


def application_tls(region: str, version: str) -> ApplicationTls:
    """What the ingresses of a region are told. `version`: as `tls_versions` has it, read before.

    Raises:
        KeySealedAway: a key was sealed under another SECRET_KEY.
    """
    box = key_box()
    certificates = tuple(ServerCertificate(row.name, row.chain + _opened(row, box)) for row in certificates_of(region))
    return ApplicationTls(version, certificates, Region.objects.get(name=region).plain_http)


def _opened(row: ApplicationCertificate, box: MultiFernet) -> str:
    try:
        return box.decrypt(row.sealed_secret.encode()).decode()
    except InvalidToken:
        raise KeySealedAway(
            f"the key of {row} was sealed under another SWITCHYARD_SECRET_KEY: set that one again, or set the"
            " certificate anew"
        ) from None
