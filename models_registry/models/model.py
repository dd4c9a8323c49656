"""Models: what applications ask for."""

from django.db import models


class Model(models.Model):
    """Something that answers prompts, under the name that applications ask for."""

    name = models.SlugField(max_length=96, primary_key=True)
    description = models.TextField(blank=True)
    created_at = models.DateTimeField()

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name
