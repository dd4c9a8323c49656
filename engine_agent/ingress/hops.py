"""The hop mark: how an ingress proves to another region's that it sent a request there, so that it never comes back.

Pure text. A mark that is not proven is taken away and the request treated as any other: it would else open what only
ingresses may (a request without a key) and keep a region from helping. The proof binds the mark to one request (its id,
method, path, tenant, class, pool and whole body) and to a minute; the secret is the fleet's, comes with the table, and
changes without a reload. What the head states of the body is compared with it once it is there.
"""

import base64
from collections.abc import Sequence

from engine_agent.ingress import headers
from engine_agent.ingress.bad_table import BadTable
from engine_agent.ingress.links import HOPS
from engine_agent.ingress.responses import ErrorResponse, return_rule

HOPS_MAP = "hops.map"
"""`sign` -> the secret that proves our marks; `other` -> one more that proves those of ingresses with another table."""
SIGNING, OTHER = "sign", "other"
MAX_SECRETS = 2
MIN_SECRET_CHARS = 32
KEY_MARK = "~"
"""In a mark, between the region and the prefix of the request's key, which nobody else may claim."""
CLOCKS_APART_S = 60
"""How old, or how far ahead by another machine's clock, a mark may be."""
BODY_DIGEST = "req.body,sha2(256),hex"
OTHER_BODY = ErrorResponse(403, "forged_mark", "this mark of another region is of a request with another body")
_REQUEST = (
    "%[var(txn.request_id)]|%[method]|"
    + "".join(f"%[req.hdr({name}),url_enc]|" for name in (headers.TENANT, headers.CLASS, headers.POOL))
    + "%[pathq]"
)
"""What a mark is for. Only the last part may have a bar in it, so no two requests read the same."""


def hop_entries(secrets: Sequence[str]) -> dict[str, str]:
    """The map of a table's secrets.

    Raises:
        BadTable: more than two, or one that is too short or not plain text.
    """
    if len(secrets) > MAX_SECRETS:
        raise BadTable(f"hop_secrets: at most {MAX_SECRETS}, the one to sign with first, not {len(secrets)}")
    if any(len(secret) < MIN_SECRET_CHARS or not secret.isalnum() or not secret.isascii() for secret in secrets):
        raise BadTable(f"hop_secrets: each is {MIN_SECRET_CHARS} or more letters and digits")
    # HAProxy takes the key of a MAC in Base64.
    coded = [base64.b64encode(secret.encode()).decode() for secret in secrets]
    return dict(zip((SIGNING, OTHER), coded, strict=False))


def proof_rules(*, has_links: bool) -> list[str]:
    """Note in `txn.hop` which region sent the request here, if it proves that, and take every other mark away. The key
    that it says it had there goes on with it.

    `has_links`: other ingresses come in on a socket of their own, and marks count only there.
    """
    is_hop = "{ var(txn.hop) -m found }"
    keep_header = f"http-request set-var(txn.hop_header) req.hdr({headers.HOP})"
    claim = "".join(f"%[var(txn.hop_header),field({number},|)]|" for number in (1, 2, 3))
    return [
        *([f"http-request del-header {headers.HOP} if !{{ so_name {HOPS} }}"] if has_links else ()),
        f"acl has_hop req.hdr({headers.HOP}) -m found",
        f"{keep_header} if has_hop",
        f"http-request set-var-fmt(txn.hop_claim) '{claim}{_REQUEST}' if has_hop",
        "http-request set-var(txn.hop_at) var(txn.hop_header),field(2,|) if has_hop",
        "http-request set-var(txn.hop_body) var(txn.hop_header),field(3,|) if has_hop",
        "http-request set-var(txn.hop_proof) var(txn.hop_header),field(4,|) if has_hop",
        *(rule for secret in (SIGNING, OTHER) for rule in _proof(secret)),
        f"http-request del-header {headers.HOP} if has_hop !{is_hop}",
        f"http-request del-header {headers.POOL} if !{is_hop}",
        f"http-request set-var(txn.hop_key) var(txn.hop),field(2,{KEY_MARK}) if {is_hop}",
        f"http-request set-var(txn.hop) var(txn.hop),field(1,{KEY_MARK}) if {is_hop}",
        f"http-request set-header {headers.KEY} %[var(txn.hop_key)] if {{ var(txn.hop_key) -m len gt 0 }}",
        "acl is_marked var(txn.hop) -m found",
    ]


def _proof(secret: str) -> list[str]:
    is_right = "{ var(txn.hop_proof),secure_memcmp(txn.hop_expected) }"
    is_fresh = f"{{ date,sub(txn.hop_at),add({CLOCKS_APART_S}) -m int 0:{2 * CLOCKS_APART_S} }}"
    return [
        f"http-request set-var(txn.hop_secret) str({secret}),map_str({HOPS_MAP}) if has_hop",
        "http-request set-var(txn.hop_expected) var(txn.hop_claim),hmac(sha256,txn.hop_secret),hex if has_hop",
        f"http-request set-var(txn.hop) var(txn.hop_header),field(1,|) if has_hop {is_right} {is_fresh}",
    ]


def strip_rules() -> list[str]:
    """Without other regions every mark is forged."""
    return [
        f"http-request del-header {headers.HOP}",
        f"http-request del-header {headers.POOL}",
        "acl is_marked always_false",
    ]


def body_rules() -> list[str]:
    """The whole body of a marked request is there: it must be the one that the mark is for."""
    return [f"http-request set-var(txn.body_digest) {BODY_DIGEST} if is_marked", _other_body_rule()]


def parsed_body_rules() -> list[str]:
    """The same for a large body, which only its body parser has whole."""
    return [
        f"http-request set-var(txn.hop_body) req.hdr({headers.HOP}),field(3,|)",
        f"http-request set-var(txn.body_digest) req.hdr({headers.BODY})",
        _other_body_rule(),
    ]


def _other_body_rule() -> str:
    return f"{return_rule(OTHER_BODY)} if is_marked !{{ var(txn.hop_body),strcmp(txn.body_digest) eq 0 }}"


def mark_rules(region: str, body_s: int) -> list[str]:
    """Mark a request that leaves for another region, and name the pool it is for: names may be split there, too. A body
    that came from another frontend of ours may take `body_s` to be there."""
    sender = f"{region}{KEY_MARK}%[req.hdr({headers.KEY})]"
    unless_known = "if !{ var(txn.body_digest) -m found }"
    return [
        f"http-request wait-for-body time {body_s}s {unless_known}",
        f"http-request set-var(txn.body_digest) {BODY_DIGEST} {unless_known}",
        f"http-request set-header {headers.POOL} %[var(txn.pool)]",
        f"http-request set-var-fmt(txn.hop_claim) '{sender}|%[date]|%[var(txn.body_digest)]'",
        f"http-request set-var-fmt(txn.hop_signed) '%[var(txn.hop_claim)]|{_REQUEST}'",
        f"http-request set-var(txn.hop_secret) str({SIGNING}),map_str({HOPS_MAP})",
        "http-request set-var(txn.hop_proof) var(txn.hop_signed),hmac(sha256,txn.hop_secret),hex",
        f"http-request del-header {headers.BODY}",
        f"http-request set-header {headers.HOP} %[var(txn.hop_claim)]|%[var(txn.hop_proof)]",
    ]
