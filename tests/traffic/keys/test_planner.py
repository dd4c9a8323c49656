"""Key texts that the control plane derives for itself."""

import hashlib

from engine_agent.ingress.key_map import PREFIX
from engine_agent.protocol.ingress_messages import ApiKey
from kernel.secrets import PREFIX_DIGITS
from traffic.keys.planner import playground_key, playground_key_text, sender_key_text, with_sender

SECRET = "0" * 50
KEY = ApiKey("0a1b2c3d", "ab" * 32, "acme", "realtime", ("chat",), 1795000000.0, 60, 9000, 4)


def test_the_sender_shows_another_text_for_the_same_key() -> None:
    shown = with_sender(KEY, SECRET)
    assert shown.sender_digest == hashlib.sha256(sender_key_text(KEY.prefix, SECRET).encode()).hexdigest()
    assert (shown.prefix, shown.pools, shown.tokens_per_min) == (KEY.prefix, KEY.pools, KEY.tokens_per_min)


def test_the_playground_has_a_key_of_its_own() -> None:
    key, text = playground_key(SECRET), playground_key_text(SECRET)
    assert key.digest == hashlib.sha256(text.encode()).hexdigest()
    assert text.startswith(f"sw_{key.prefix}_")
    assert (key.tenant, key.serving_class, key.pools) == ("switchyard-playground", "near_realtime", ())
    assert PREFIX.fullmatch(key.prefix)
    assert PREFIX_DIGITS < len(key.prefix) <= 16, "equal to an application key's, or longer than the columns of keys"


def test_each_key_and_each_installation_has_another() -> None:
    secrets = (SECRET, "1" * 50)
    texts = {sender_key_text(prefix, secret) for prefix in ("aa11", "bb22") for secret in secrets}
    assert len(texts | {playground_key_text(secret) for secret in secrets}) == 6
