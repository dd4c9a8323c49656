"""What every request meets before a backend is chosen: the rules of the frontends, one function for each question.

Pure text; `config` says in which order they stand. A rule may answer a request or note what it found in a variable;
none of them picks a cell.
"""

from engine_agent.ingress import affinity, answers, headers, splits
from engine_agent.ingress.layout import LISTING_MAP, MODELS_MAP, SHARE_SCALE, Layout
from engine_agent.ingress.sections import (
    LOOK_UP_RULE,
    MAX_HEAD_BYTES,
    UNSENT_STATUS,
    held_bytes,
    model_rules,
    refuse_longer_than,
)
from engine_agent.ingress.settings import IngressSettings

RING_RULE = f"http-request set-var(txn.ring) var(txn.pool),map_str({affinity.RINGS_MAP})"
SPILL_RULE = "http-request set-var(txn.spill) var(txn.pool),regsub(^pool,spill)"
INFERENCE_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")


def health_rules() -> list[str]:
    """GET /healthz: this process serves. With ?model=M: and a cell of this region would take a request for M."""
    healthy = f"""http-request return status 200 {answers.JSON_TYPE} string '{{"status":"ok"}}'"""
    unhealthy = f"""http-request return status 503 {answers.JSON_TYPE} string '{{"status":"no ready cell"}}'"""
    return [
        "acl is_health path /healthz",
        f"{healthy} if is_health !{{ url_param(model) -m found }}",
        f"http-request set-var(txn.pool) url_param(model),url_dec,map_str({MODELS_MAP}) if is_health",
        *_split_health_rules(),
        f"{healthy} if is_health {{ var(txn.pool),nbsrv gt 0 }}",
        f"{unhealthy} if is_health",
    ]


def _split_health_rules() -> list[str]:
    """Of a name that is split: whether any of its pools would take a request."""
    first = f"var(txn.split),map_int({splits.SPLITS_MAP})"
    is_split = f"{{ var(txn.pool) -m beg {splits.PREFIX} }}"
    return [
        f"http-request set-var(txn.split) var(txn.pool),field(3,.) if is_health {is_split}",
        f"http-request set-var(txn.pool) {first} if is_health {{ var(txn.split) -m found }}",
        *splits.turn_rules("is_health !{ var(txn.pool),nbsrv gt 0 }"),
    ]


def listing_rules() -> list[str]:
    of_one = """'{"id":"%[var(txn.model),json(utf8s)]","object":"model","created":0,"owned_by":"switchyard"}'"""
    listing = f"'%[str(all),map_str({LISTING_MAP})]'"
    return [
        "acl is_listing path /v1/models",
        "acl is_one_model path_beg /v1/models/",
        answers.returned(answers.ONLY_GET, ("Allow", "GET")) + " if is_listing !METH_GET or is_one_model !METH_GET",
        f"http-request return status 200 {answers.JSON_TYPE} lf-string {listing} if is_listing",
        "http-request set-var(txn.model) path,regsub(^/v1/models/,),url_dec if is_one_model",
        f"http-request set-var(txn.pool) var(txn.model),map_str({MODELS_MAP}) if is_one_model",
        answers.returned(answers.UNKNOWN_MODEL) + " if is_one_model !{ var(txn.pool) -m found }",
        f"http-request return status 200 {answers.JSON_TYPE} lf-string {of_one} if is_one_model",
    ]


def path_rules() -> list[str]:
    return [
        f"acl is_inference path {' '.join(INFERENCE_PATHS)}",
        f"{answers.returned(answers.UNKNOWN_URL)} if !is_inference",
        f"{answers.returned(answers.ONLY_POST, ('Allow', 'POST'))} if !METH_POST",
    ]


def body_rules(layout: Layout, settings: IngressSettings) -> list[str]:
    """Wait for the whole body, which replays need too, and find the pool of the model that it names."""
    longest = held_bytes(layout, settings)
    return [
        *answers.refused(answers.head_too_large(MAX_HEAD_BYTES), f"{{ req.hdrs,length gt {MAX_HEAD_BYTES} }}"),
        f"http-request del-header {headers.MODEL}",
        f"http-request del-header {headers.AFFINITY}",
        *refuse_longer_than(layout.max_body_bytes, "req.hdr_val(content-length)"),
        # `curl -d` calls its JSON a form; every body here is JSON, and engines insist on hearing so.
        "http-request set-header Content-Type application/json",
        f"acl is_long req.hdr_val(content-length) gt {longest}",
        f"http-request wait-for-body time {settings.times.request_body_s}s if !is_long",
        f"acl is_long req.body_size gt {longest}",
        *answers.refused(answers.long_bodies_unread(layout.retry_after_s), "is_long { nbsrv(reader) eq 0 }"),
        *model_rules("!is_long"),
        f"{LOOK_UP_RULE} if !has_pool",
        f"{answers.returned(answers.UNKNOWN_MODEL)} if !is_long !has_pool",
    ]


def named_rules() -> list[str]:
    """A long request as the reader sends it back. The socket is for the reader alone, which overwrites the header.

    What no cell answered is told to the reader, which has the whole request to send again; nothing here has.
    """
    return [
        # The frontend that took it from outside has taken away what was not proven.
        f"http-request set-var(txn.hop) req.hdr({headers.HOP}),field(1,|)",
        "acl is_marked var(txn.hop) -m found",
        f"http-request set-var(txn.request_id) req.hdr({headers.REQUEST_ID})",
        f"http-request set-var(txn.model) req.hdr({headers.MODEL}),url_dec",
        f"http-request del-header {headers.MODEL}",
        f"http-request set-var(txn.affinity) req.hdr({headers.AFFINITY})",
        f"http-request del-header {headers.AFFINITY}",
        f"http-response set-header {headers.MODEL} %[var(txn.model),url_enc]",  # for the access log
        f"http-after-response set-status {UNSENT_STATUS} if {{ status 503 }} {{ res.hdr({headers.RETRY}) -m found }}",
        f"http-after-response set-status {UNSENT_STATUS} if {{ status 502 }} !{{ res.hdr({headers.CELL}) -m found }}",
        LOOK_UP_RULE,
        "acl has_pool var(txn.pool) -m found",
        f"{answers.returned(answers.UNKNOWN_MODEL)} if !has_pool",
    ]


def pool_rules(*, has_body: bool) -> list[str]:
    """Which pool a split means, and what the request's affinity key is, where either question arises.

    `has_body`: the key is in the body; else the reader has found it.
    """
    return [
        *splits.draw_rules(),
        RING_RULE,
        "acl wants_key var(txn.ring) -m found",
        f"acl wants_key var(txn.pool) -m beg {splits.STICKY}",
        *(affinity.key_rules() if has_body else ()),
        *splits.sticky_rules(),
        SPILL_RULE,
        "acl can_serve var(txn.pool),nbsrv gt 0",
        "acl can_spill var(txn.spill),nbsrv gt 0",
        "acl is_lost var(txn.spill),nbsrv eq 0",
        "acl is_lost var(txn.hop) -m found",
        *(rule for turn in splits.turn_rules("!can_serve is_lost") for rule in (turn, f"{SPILL_RULE} if is_drawn")),
        f"{RING_RULE} if is_drawn",
    ]


def deadline_rules() -> list[str]:
    """From when a deadline counts: from here, also where the request waits, and not from another region anew."""
    return [
        f"http-request del-header {headers.ARRIVED} if !is_marked",
        f"http-request set-header {headers.ARRIVED} %[date(0,ms)]"
        f" if !is_marked {{ req.hdr({headers.DEADLINE}) -m found }}",
    ]


def judgement_rules(layout: Layout) -> list[str]:
    """Whether cells here, or another region, can serve the pool; if neither, say so."""
    nobody = answers.returned(answers.no_ready_cell(layout.retry_after_s))
    return [
        f"http-request set-var(txn.share) var(txn.pool),map_str_int({splits.SHARES_MAP},0)",
        f"acl must_spill rand({SHARE_SCALE}),sub(txn.share) lt 0",
        f"{nobody} if has_pool !can_serve is_marked",
        f"{nobody} if has_pool !can_serve !can_spill",
    ]
