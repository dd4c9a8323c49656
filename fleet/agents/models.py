"""The fleet's certificate authorities, the certificates that they signed, and applications' certificates for
ingresses."""

from django.db import models
from django.db.models import Q

from engine_agent.protocol.identity import IdentityKind
from fleet.agents.planner import AuthorityState
from fleet.reconcile.planning.states import choices
from fleet.regions.models import Region


class FleetAuthority(models.Model):
    """One authority. `sealed_secret`: its private key, encrypted with a key derived from SECRET_KEY, because every
    control host signs. `revoked`: its last signed revocation list (PEM)."""

    fleet = models.CharField(max_length=16)
    state = models.CharField(max_length=16, choices=choices(AuthorityState))
    identifier = models.CharField(max_length=16, unique=True)
    certificate = models.TextField()
    sealed_secret = models.TextField()
    revoked = models.TextField()
    revoked_number = models.PositiveBigIntegerField(default=1)
    created_at = models.DateTimeField()
    state_since = models.DateTimeField()

    class Meta:
        ordering = ["id"]
        constraints = [
            models.UniqueConstraint(
                fields=["state"],
                condition=Q(state__in=[AuthorityState.NEXT.value, AuthorityState.CURRENT.value]),
                name="authority_one_signs",
            ),
        ]

    def __str__(self) -> str:
        return f"authority {self.identifier} of {self.fleet}"


class IssuedCertificate(models.Model):
    """A signed certificate for the public key with the SHA-256 `key_pin` (Base64). `believed`: SHA-256, in hexadecimal,
    of its owner's authority bundle at the request."""

    authority = models.ForeignKey(FleetAuthority, on_delete=models.CASCADE, related_name="certificates")
    serial = models.CharField(max_length=40, unique=True)
    kind = models.CharField(max_length=16, choices=choices(IdentityKind))
    subject = models.CharField(max_length=64)
    key_pin = models.CharField(max_length=44, blank=True)
    believed = models.CharField(max_length=64, blank=True)
    created_at = models.DateTimeField()
    not_after = models.DateTimeField()
    revoked_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ["id"]
        indexes = [models.Index(fields=["kind", "subject"], name="certificate_owner")]

    def __str__(self) -> str:
        return f"certificate {self.serial} of {self.kind} {self.subject}"


class ApplicationCertificate(models.Model):
    """A certificate with its chain (PEM, certificate first) for the ingresses of one region, or of all.

    `sealed_secret`: its private key, encrypted with a key derived from SECRET_KEY. `names`: its hosts. `fingerprint`:
    SHA-256 of the certificate; `digest`: of the whole chain, both in hexadecimal."""

    name = models.SlugField(max_length=40, unique=True)
    region = models.ForeignKey(
        Region, on_delete=models.PROTECT, null=True, blank=True, related_name="application_certificates"
    )
    chain = models.TextField()
    sealed_secret = models.TextField()
    names = models.JSONField()
    issuer = models.CharField(max_length=300)
    key_kind = models.CharField(max_length=16)
    fingerprint = models.CharField(max_length=64)
    digest = models.CharField(max_length=64)
    not_before = models.DateTimeField()
    not_after = models.DateTimeField()
    actor = models.CharField(max_length=64)
    created_at = models.DateTimeField()
    changed_at = models.DateTimeField()

    class Meta:
        ordering = ["id"]

    def __str__(self) -> str:
        return f"certificate {self.name}"
