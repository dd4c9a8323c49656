"""What ingresses show to applications."""

from django.db import models

from fleet.models.region import Region


class ApplicationCertificate(models.Model):
    """A certificate with its chain (PEM, the certificate first) for the ingresses of a region, or of all.

    `sealed_secret` is its private key under a key that is derived from SECRET_KEY. `names` are the hosts that it is
    for, `fingerprint` is the SHA-256 of the certificate and `digest` that of the whole chain, in hexadecimal.
    """

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
