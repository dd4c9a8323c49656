"""What every request meets before a backend is chosen: the rules of the frontends, one function for each question.

Pure text; `config` says in which order they stand, and each costs every request some 0.1 µs: what a table does not need
is not rendered, and what few requests need stands where only those come. A rule may answer a request or keep what it
found in a variable; none of them picks a cell.
"""

from engine_agent.ingress import (
    access_log,
    adapters,
    affinity,
    bad_bodies,
    headers,
    hold,
    hops,
    keys,
    overflow,
    responses,
    splits,
)
from engine_agent.ingress.api_paths import HEALTH_PATHS, IS_INFERENCE, MODELS_PATH, wrong_method_rule
from engine_agent.ingress.desired import MODELS_MAP, DesiredHaproxy, Features
from engine_agent.ingress.model_listing import LISTING_ALL, LISTING_MAP, LISTING_ONE
from engine_agent.ingress.sections import (
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    MODEL_LOOKUP_RULE,
    PARSER_SERVER,
    encoding_rule,
    max_buffered_body_bytes,
    max_parsed_body_bytes,
    model_rules,
    shape_rules,
)
from engine_agent.ingress.settings import IngressSettings
from engine_agent.protocol.states import ServingClass

CELLS_RULE = f"http-request set-var(txn.cells) var(txn.pool),map_str({affinity.CELLS_MAP})"
CELLS_UP = "var(txn.pool),lua.cells_up,add(0)"
"""As a number: what a script converts is text to HAProxy."""
HEAD_TOO_LARGE = " or ".join(
    f"{{ {size} gt {most} }}"
    for size, most in (
        ("req.hdrs,length", MAX_HEAD_BYTES),
        ("url,length", MAX_HEAD_BYTES),
        ("req.fhdr_cnt", MAX_HEADERS),
    )
)
HOLDERS_UP = "var(txn.pool),concat(,txn.holders),lua.holders_up,add(0)"
MANY_UP = "var(txn.pool),nbsrv gt 1"
"""HAProxy's own count has the server that stands in for cells as one when there are none, so above one it counts cells:
then no script runs."""
SPILL_RULE = "http-request set-var(txn.spill) var(txn.pool),regsub(^pool,spill)"


def health_rules(features: Features) -> list[str]:
    """GET /health, /healthz: this process serves. With ?model=M: and a cell of this region would take a request for
    M."""
    healthy = f"""http-request return status 200 {responses.JSON_CONTENT_TYPE} string '{{"status":"ok"}}'"""
    unhealthy = (
        f"""http-request return status 503 {responses.JSON_CONTENT_TYPE} string '{{"status":"no ready cell"}}'"""
    )
    return [
        f"acl is_health path {' '.join(HEALTH_PATHS)}",
        wrong_method_rule(("GET",), "is_health"),
        f"{healthy} if is_health !{{ url_param(model) -m found }}",
        f"http-request set-var(txn.pool) url_param(model),url_dec,map_str({MODELS_MAP}) if is_health",
        *_split_health_rules(),
        *_adapter_health_rules(features, healthy, unhealthy),
        f"{healthy} if is_health {{ {CELLS_UP} gt 0 }}",
        f"{unhealthy} if is_health",
    ]


def _adapter_health_rules(features: Features, healthy: str, unhealthy: str) -> list[str]:
    """Of an adapter that not every cell has: whether one that has it would take a request."""
    if not features.adapters:
        return []
    return [
        *adapters.found_rules("url_param(model),url_dec", "is_health"),
        f"{healthy} if is_health {adapters.IS_PARTIAL} {{ {HOLDERS_UP} gt 0 }}",
        f"{unhealthy} if is_health {adapters.IS_PARTIAL}",
    ]


def _split_health_rules() -> list[str]:
    """Of a name that is split: whether any of its pools would take a request."""
    first = f"var(txn.split),map_int({splits.SPLITS_MAP})"
    is_split = f"{{ var(txn.pool) -m beg {splits.PREFIX} }}"
    return [
        f"http-request set-var(txn.split) var(txn.pool),field(3,.) if is_health {is_split}",
        f"http-request set-var(txn.pool) {first} if is_health {{ var(txn.split) -m found }}",
        *splits.fallback_rules(f"is_health !{{ {CELLS_UP} gt 0 }}"),
    ]


def once_rules() -> list[str]:
    """Refuse a request that has a header twice which decides about it, or a class that does not exist. Two classes in
    one header are two. Remove our own headers that neither a client nor another ingress may send."""
    known = "|".join(name.removeprefix(headers.OWN_PREFIX) for name in (*headers.FROM_CLIENTS, *headers.FROM_INGRESSES))
    is_class = f"{{ req.hdr({headers.CLASS}) {' '.join(ServingClass)} }}"
    return [
        *(f"acl is_doubled req.{'hdr' if name == headers.CLASS else 'fhdr'}_cnt({name}) gt 1" for name in headers.ONCE),
        responses.refuse_rule(responses.DOUBLED_HEADER, "is_doubled"),
        responses.refuse_rule(responses.UNKNOWN_CLASS, f"{{ req.hdr({headers.CLASS}) -m found }} !{is_class}"),
        f"http-request del-header ^{headers.OWN_PREFIX.lower()}(?!(?:{known.lower()})$) -m reg",
    ]


def listing_rules(features: Features, version: str) -> list[str]:
    """The models that there are; to a key that is for some pools, those that it opens. And what version this is."""
    answer = f"http-request return status 200 {responses.JSON_CONTENT_TYPE} lf-string"
    return [
        f"acl is_listing path {MODELS_PATH}",
        f"acl is_one_model path_beg {MODELS_PATH}/",
        wrong_method_rule(("GET",), "is_listing"),
        wrong_method_rule(("GET",), "is_one_model"),
        *(keys.listing_rules("is_listing") if features.keys else ()),
        f"{answer} '%[var(txn.listing)]' if is_listing {{ var(txn.listing) -m found }}",
        f"{answer} '%[str({LISTING_ALL}),map_str({LISTING_MAP})]' if is_listing",
        f"http-request set-var(txn.model) path,regsub(^{MODELS_PATH}/,),url_dec if is_one_model",
        f"http-request set-var(txn.pool) var(txn.model),map_str({MODELS_MAP}) if is_one_model",
        *(keys.listing_rules("is_one_model") if features.keys else ()),
        responses.return_rule(responses.UNKNOWN_MODEL) + " if is_one_model !{ var(txn.pool) -m found }",
        f"{answer} '%[str({LISTING_ONE}),concat(,txn.model),map_str({LISTING_MAP})]' if is_one_model",
        "acl is_version path /version",
        wrong_method_rule(("GET",), "is_version"),
        f"""{answer} '{{"version":"{version}"}}' if is_version""",
    ]


def inference_rules() -> list[str]:
    """Send everything but inference past all other rules, to where the rest is answered. Declares `is_inference`."""
    return [IS_INFERENCE, "http-request allow if !METH_POST or !is_inference"]


def model_error_rules() -> list[str]:
    """What is wrong with a request that names no model of the table, or no path."""
    return [
        f"{responses.BAD_BODY_RULE} if {{ var(txn.body_error) -m found }}",
        IS_INFERENCE,
        f"{responses.return_rule(responses.UNKNOWN_MODEL)} if is_inference METH_POST",
    ]


def body_rules(desired: DesiredHaproxy, settings: IngressSettings) -> list[str]:
    """Wait for the whole body, which replays need too, and find the pool of the model that it names. Long bodies go on
    to a body parser, and what names no model to the default backend. Declares `is_large`, `has_pool`."""
    longest = max_buffered_body_bytes(desired, settings)
    return [
        responses.refuse_rule(responses.head_too_large(MAX_HEAD_BYTES), HEAD_TOO_LARGE),
        *overflow.strip_rules(),
        encoding_rule(),
        # `curl -d` calls its JSON a form; every body here is JSON, and engines insist on that header.
        "http-request set-header Content-Type application/json",
        f"acl is_large req.hdr_val(content-length) gt {longest}",
        f"acl is_large req.body_size gt {longest}",
        *bad_bodies.source_rules("is_large"),
        f"http-request allow if {{ req.hdr_val(content-length) gt {longest} }}",
        f"http-request wait-for-body time {settings.times.request_body_s}s",
        *bad_bodies.source_rules(f"{{ req.body_size gt {longest} }}"),
        f"http-request allow if {{ req.body_size gt {longest} }}",
        *(hops.body_rules() if desired.features.hops else ()),
        *model_rules(bad_bodies.source_rules("!has_pool !is_name"), bad_bodies.refused_rules()),
        "http-request allow if !has_pool",
        *shape_rules(),
    ]


def unread_rule(retry_after_s: int) -> str:
    """What comes without a model was sent here in place of a body parser that is down."""
    return responses.refuse_rule(
        responses.body_parser_unavailable(retry_after_s), f"!{{ req.fhdr({headers.MODEL}) -m found }}"
    )


def parsed_body_rules(features: Features, settings: IngressSettings, retry_after_s: int) -> list[str]:
    """A large request as its body parser sends it back. The socket is for body parsers alone, which overwrite the
    header.

    A request that no cell answered gets a status of its own: whoever sent it here has it whole, to send it again.
    """
    return [
        *responses.form_rules(),
        unread_rule(retry_after_s),
        # The frontend that took it from outside has taken away what was not proven.
        f"http-request set-var(txn.hop) req.hdr({headers.HOP}),field(1,|)",
        "acl is_marked var(txn.hop) -m found",
        *(hops.parsed_body_rules() if features.hops else ()),
        *overflow.attempt_rules(settings),
        f"http-request set-var(txn.request_id) req.hdr({headers.REQUEST_ID})",
        f"http-request set-var(txn.model) req.hdr({headers.MODEL}),url_dec",
        f"http-request del-header {headers.MODEL}",
        f"http-request set-var(txn.affinity) req.hdr({headers.AFFINITY})",
        f"http-request del-header {headers.AFFINITY}",
        f"http-response set-header {headers.MODEL} %[var(txn.model),url_enc]",  # for the access log
        access_log.trail_rule(),
        # Whose it is that was refused, for those who count.
        f"http-after-response set-header {headers.DEPLOYMENT} %[var(txn.pool),regsub(^pool.,)]"
        f" if {{ status ge 500 }} {{ var(txn.pool) -m found }} !{{ res.hdr({headers.DEPLOYMENT}) -m found }}",
        *(overflow.marked_answer_rules() if features.hops else ()),
        MODEL_LOOKUP_RULE,
        *overflow.pool_rules(),
        "acl has_pool var(txn.pool) -m found",
        f"{responses.return_rule(responses.UNKNOWN_MODEL)} if !has_pool",
    ]


def pool_rules(features: Features, *, has_body: bool) -> list[str]:
    """Which pool a split means, and what the request's affinity key is, where either question arises.

    `has_body`: the key is in the body; else a body parser has found it.
    """
    mixes_adapter = features.adapters and features.affinity
    wants_key = [
        *(adapters.found_rules() if features.adapters else ()),
        *([CELLS_RULE, "acl wants_key var(txn.cells) -m found"] if features.affinity else ()),
        *([f"acl wants_key var(txn.pool) -m beg {splits.STICKY}"] if features.sticky_splits else ()),
        *(affinity.key_rules() if has_body and (features.affinity or features.sticky_splits) else ()),
        *(affinity.prefix_rules(has_body=has_body) if features.by_cache else ()),
        # A short request that was sent once more brings the key that was made of both.
        *(adapters.affinity_rules("" if has_body else "!is_short") if mixes_adapter else ()),
    ]
    if not features.splits:
        return [*wants_key, *([SPILL_RULE, *_usable_rules(features)] if features.hops else ())]
    again = [f"{SPILL_RULE} if is_drawn"] if features.hops else []
    return [
        *splits.draw_rules(features.hops),
        *wants_key,
        *splits.sticky_rules(),
        *([SPILL_RULE] if features.hops else ()),
        *_usable_rules(features),
        *(rule for turn in splits.fallback_rules("!can_serve is_lost") for rule in (turn, *again)),
        *([f"{CELLS_RULE} if is_drawn"] if features.affinity else ()),
    ]


def _usable_rules(features: Features) -> list[str]:
    """Declares `can_serve`, `can_spill` and `is_lost`: whether this region, or another one, can serve the pool."""
    here = [f"acl can_serve {MANY_UP}", f"acl can_serve {CELLS_UP} gt 0"]
    if features.adapters:
        here = [
            f"acl is_partial {adapters.PARTIAL}",
            # With cells named behind it, the pool is none that the first two know.
            *(rule.replace("var(txn.pool)", "var(txn.pool),concat(,txn.holders)") for rule in here),
            f"acl can_serve {HOLDERS_UP} gt 0",
        ]
    if not features.hops:
        return [*here, "acl is_lost always_true"]
    return [
        *here,
        "acl can_spill var(txn.spill),nbsrv gt 0",
        "acl is_lost var(txn.spill),nbsrv eq 0",
        "acl is_lost var(txn.hop) -m found",
    ]


def deadline_rules() -> list[str]:
    """From when a deadline counts: from here, also where the request waits, and not from another region anew."""
    return [
        f"http-request del-header {headers.ARRIVED} if !is_marked",
        f"http-request set-header {headers.ARRIVED} %[date(0,ms)]"
        f" if !is_marked {{ req.hdr({headers.DEADLINE}) -m found }}",
    ]


def availability_rules(desired: DesiredHaproxy) -> list[str]:
    """Whether cells here, or another region, can serve the pool; if neither, refuse."""
    if not desired.features.hops:
        return []  # the pool's backend does
    refused = responses.return_rule(responses.no_ready_cell(desired.retry_after_s))
    return [
        access_log.class_rule() + " if !can_serve",
        f"{refused} if is_marked !can_serve",
        *([hold.may_hold_rule()] if desired.features.holds else ()),
        f"{refused} if !can_serve !can_spill{' !may_hold' if desired.features.holds else ''}",
    ]


_LEAVE = "use_backend %[var(txn.spill)] if has_pool !is_marked can_spill"
_STAY = "use_backend %[var(txn.pool)] if has_pool"
BACKEND_CHOICE = (f"use_backend {overflow.AGAIN_BACKEND} if has_pool !is_marked", _STAY)
"""A short request goes through the backend that can send it again. One that another region sent is tried once here:
the region that it came from sends it again."""


def attempt_choice(features: Features) -> list[str]:
    """Where one attempt goes: to other regions when no cell here can serve, where it was not refused before, and else
    by the pool's share."""
    if not features.hops:
        return [_STAY]
    # Other regions may lack an adapter that not every cell has: what has it here is used first.
    unless_partial = " !is_partial" if features.adapters else ""
    return [
        f"http-request set-var(txn.share) var(txn.pool),map_str_int({splits.SHARES_MAP},0)",
        f"acl must_spill rand({splits.SHARE_SCALE}),sub(txn.share) lt 0",
        f"{_LEAVE} !can_serve",
        f"{_LEAVE} must_leave",
        f"{_LEAVE} must_spill !must_stay{unless_partial}",
        _STAY,
    ]


def body_parser_choice(desired: DesiredHaproxy, settings: IngressSettings) -> list[str]:
    """The body parser of a large body: the first whose buffers hold it and that is there. The last one also takes
    bodies of unknown length."""
    is_large = "METH_POST is_inference is_large"
    *others, last = settings.body_parsers
    return [
        *(
            f"use_backend {tier.name} if {is_large}"
            f" {{ req.hdr_val(content-length) le {max_parsed_body_bytes(desired, tier)} }}"
            f" {{ srv_is_up({tier.name}/{PARSER_SERVER}) }}"
            for tier in others
        ),
        f"use_backend {last.name} if {is_large}",
    ]
