"""Reads the certificates of applications, with their keys, for the ingresses of a region. Never writes."""

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
    """Returns the cipher for private keys: encrypts with the current SECRET_KEY and also decrypts with earlier ones."""
    return MultiFernet([_fernet(secret) for secret in (settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS)])


def is_sealed_now(sealed: str) -> bool:
    """Whether the current SECRET_KEY decrypts it."""
    try:
        _fernet(settings.SECRET_KEY).decrypt(sealed.encode())
    except InvalidToken:
        return False
    return True


def _fernet(secret: str | bytes) -> Fernet:
    key = salted_hmac(SALT, "", secret=secret, algorithm="sha256").digest()
    return Fernet(base64.urlsafe_b64encode(key))


def certificates_of(region: str) -> QuerySet[ApplicationCertificate]:
    """Certificates of a region's ingresses: its own first, oldest first. The first is the default."""
    shown = ApplicationCertificate.objects.filter(Q(region=region) | Q(region=None))
    return shown.order_by(F("region_id").asc(nulls_last=True), "id")


def tls_versions() -> dict[str, str]:
    own: dict[str | None, list[tuple[str, ...]]] = defaultdict(list)
    rows = ApplicationCertificate.objects.values_list("name", "region_id", "digest", "changed_at")
    for name, region, digest, changed_at in rows:
        own[region].append((name, digest, changed_at.isoformat()))
    return {
        region: hashlib.sha256(json.dumps([plain_http, own[region], own[None]]).encode()).hexdigest()[:16]
        for region, plain_http in Region.objects.values_list("name", "plain_http")
    }


def application_tls(region: str, version: str) -> ApplicationTls:
    """Returns the message for a region's ingresses. `version`: from an earlier `tls_versions`. A certificate whose key
    cannot be decrypted has no text: ingresses keep their copy."""
    box = key_box()
    certificates = tuple(ServerCertificate(row.name, _certificate_pem(row, box)) for row in certificates_of(region))
    return ApplicationTls(version, certificates, Region.objects.get(name=region).plain_http)


def _certificate_pem(row: ApplicationCertificate, box: MultiFernet) -> str:
    try:
        return row.chain + box.decrypt(row.sealed_secret.encode()).decode()
    except InvalidToken:
        return ""
