"""The control plane's own keys fit those that ingresses know."""

import hashlib

from engine_agent.ingress.key_map import PREFIX
from traffic.planning.key import internal_key_text, internal_keys

SECRET = "0" * 50


def test_the_text_that_is_shown_is_the_one_whose_digest_the_table_has() -> None:
    (key,) = internal_keys(["acme", "acme"], SECRET)
    text = internal_key_text("acme", SECRET)
    assert key.digest == hashlib.sha256(text.encode()).hexdigest()
    assert text.startswith(f"sw_{key.prefix}_")
    assert (key.tenant, key.serving_class, key.pools, key.expires_at) == ("acme", "near_realtime", (), None)
    assert PREFIX.fullmatch(key.prefix)


def test_each_tenant_and_each_installation_has_another() -> None:
    texts = {internal_key_text(tenant, secret) for tenant in ("a", "b") for secret in (SECRET, "1" * 50)}
    assert len(texts) == 4
