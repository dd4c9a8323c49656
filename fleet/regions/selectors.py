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
from fleet.agents.models import ApplicationCertificate
from fleet.regions.models import Region

SALT = "fleet.application-certificate"


def key_box() -> MultiFernet:
    """What seals private keys, under the SECRET_KEY of now; it opens those that one of before sealed."""
    return MultiFernet([_box(secret) for secret in (settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS)])


def is_sealed_now(sealed: str) -> bool:
    """Whether the SECRET_KEY of now opens it, without those of before."""
    try:
        _box(settings.SECRET_KEY).decrypt(sealed.encode())
    except InvalidToken:
        return False
    return True


def _box(secret: str | bytes) -> Fernet:
    key = salted_hmac(SALT, "", secret=secret, algorithm="sha256").digest()
    return Fernet(base64.urlsafe_b64encode(key))


def certificates_of(region: str) -> QuerySet[ApplicationCertificate]:
    """Those that a region's ingresses show: its own first, the oldest first. The first is shown where none fits."""
    shown = ApplicationCertificate.objects.filter(Q(region=region) | Q(region=None))
    return shown.order_by(F("region_id").asc(nulls_last=True), "id")


def tls_versions() -> dict[str, str]:
    """Region -> what tells one `application_tls` of it from another."""
    own: dict[str | None, list[tuple[str, ...]]] = defaultdict(list)
    rows = ApplicationCertificate.objects.values_list("name", "region_id", "digest", "changed_at")
    for name, region, digest, changed_at in rows:
        own[region].append((name, digest, changed_at.isoformat()))
    return {
        region: hashlib.sha256(json.dumps([plain_http, own[region], own[None]]).encode()).hexdigest()[:16]
        for region, plain_http in Region.objects.values_list("name", "plain_http")
    }


def application_tls(region: str, version: str) -> ApplicationTls:
    """What the ingresses of a region are told. `version`: as `tls_versions` has it, read before. A certificate whose
    key was sealed under a SECRET_KEY that is not known any more has no text: an ingress keeps what it has of it."""
    box = key_box()
    certificates = tuple(ServerCertificate(row.name, _text(row, box)) for row in certificates_of(region))
    return ApplicationTls(version, certificates, Region.objects.get(name=region).plain_http)


def _text(row: ApplicationCertificate, box: MultiFernet) -> str:
    try:
        return row.chain + box.decrypt(row.sealed_secret.encode()).decode()
    except InvalidToken:
        return ""
