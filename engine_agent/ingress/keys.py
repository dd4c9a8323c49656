"""Application keys in HAProxy's configuration: whom a request is from, which pools its key opens, and its limits.

Pure text; `config` says where in a frontend each group of rules stands. All that changes with a key is in `KEYS_MAP`,
so keys come and go without a reload and without the control plane in the path of a request. The key itself goes no
further than here: cells get the tenant and the key's prefix.
"""

from engine_agent.ingress import headers, responses
from engine_agent.ingress.key_map import KEYS_MAP, REQUIRED_ENTRY, SEPARATOR, KeyField
from engine_agent.ingress.responses import ErrorResponse
from engine_agent.ingress.sections import section
from engine_agent.protocol.states import ServingClass

SCHEME, KEY_BEGINS = "Bearer", "sw_"
KEY_TABLE = "keys"
"""Backend whose stick table counts the requests of each key."""
KEY_TABLE_ENTRIES = 131_072
"""Keys in use at a time; beyond that those idle for longest are forgotten, with their counts. 10 MB when full."""
KEY_TABLE_EXPIRE_S = 86_400
COUNTERS = "conn_cur,http_req_cnt,gpc(2)"
"""Now running, requests, and of these (general purpose counters) 0: over a limit, 1: answered with 5xx. HAProxy's own
`http_fail_cnt` would also count requests whose client left."""
MISSING_KEY = ErrorResponse(
    401,
    "missing_api_key",
    "You did not provide an API key: send it as `Authorization: Bearer sw_...` or `x-api-key: sw_...`",
)
INVALID_KEY = ErrorResponse(401, "invalid_api_key", "Incorrect API key provided: it is unknown, or was revoked")
EXPIRED_KEY = ErrorResponse(401, "expired_api_key", "This API key has expired; ask for another one")
OVER_QUOTA = ErrorResponse(
    429,
    "insufficient_quota",
    "You exceeded your current quota: the budget of this month is used up; ask for a higher one, or wait for the next",
    kind="insufficient_quota",
)
REFUSALS = (MISSING_KEY, INVALID_KEY, EXPIRED_KEY, OVER_QUOTA)
MODEL_NOT_ALLOWED = ErrorResponse(
    403, "model_not_allowed", "This API key is not for the model `%[var(txn.model),json(utf8s)]`", "model"
)


def _value(field: KeyField) -> str:
    return f"var(txn.key),field({field.value},{SEPARATOR})"


_API_KEY = f"req.fhdr({headers.API_KEY})"
_HAS_KEY = "{ var(txn.key) -m found }"
_IS_SCOPED = f"{{ {_value(KeyField.SCOPED)} 1 }}"
_IS_OVER_LIMIT = "{ var(txn.refusal) -m found }"


def identity_rules(*, features: bool) -> list[str]:
    """Identify the caller. A request that another region's ingress sent was authenticated there and carries its tenant.

    While keys are not required, a request without one of ours has no tenant; a revoked key opens nothing even then.
    `features`: there are keys, or one is required.
    """
    if not features:
        shows_key = f"{{ req.hdr(Authorization) -m beg -i '{SCHEME} {KEY_BEGINS}' }}"
        return [
            f"http-request del-header {headers.TENANT} if !is_marked",
            f"http-request del-header {headers.COUNTED}",
            responses.refuse_rule(INVALID_KEY, f"{shows_key} or {{ {_API_KEY} -m beg {KEY_BEGINS} }}"),
            "http-request del-header Authorization",
            f"http-request del-header {headers.API_KEY}",
        ]
    return [
        f"http-request del-header {headers.TENANT} if !is_marked",
        "http-request set-var(txn.key_text) http_auth_bearer if !is_marked",
        f"acl has_api_key {_API_KEY} -m found",
        # Whatever else Authorization holds differs from it, too.
        responses.refuse_rule(
            responses.TWO_KEYS,
            f"has_api_key {{ req.hdr(Authorization) -m found }} !{{ {_API_KEY},strcmp(txn.key_text) eq 0 }}",
        ),
        f"http-request set-var(txn.key_text) {_API_KEY} if has_api_key !is_marked",
        f"http-request del-header {headers.API_KEY}",
        "http-request del-header Authorization",
        f"acl shows_key var(txn.key_text) -m beg {KEY_BEGINS}",
        f"http-request set-var(txn.key) var(txn.key_text),sha2(256),hex,lower,map_str({KEYS_MAP}) if shows_key",
        "acl has_key var(txn.key) -m found",
        f"acl keys_required str({REQUIRED_ENTRY}),map_str({KEYS_MAP}) 1",
        f"http-request set-var(txn.key_prefix) {_value(KeyField.PREFIX)} if has_key",
        f"http-request set-var(txn.key_expires) {_value(KeyField.EXPIRES_AT)} if has_key",
        # The body may not have arrived; a client that is still sending it must be able to read the response.
        responses.refuse_rule(INVALID_KEY, "shows_key !has_key"),
        responses.refuse_rule(MISSING_KEY, "!shows_key !is_marked keys_required"),
        responses.refuse_rule(EXPIRED_KEY, "has_key { date,sub(txn.key_expires) ge 0 }"),
        responses.refuse_rule(OVER_QUOTA, f"has_key {{ {_value(KeyField.OVER_QUOTA)} 1 }}"),
        f"http-request set-var(txn.is_sender) bool(true) if has_key {{ {_value(KeyField.SENDER)} 1 }}",
        f"http-request set-header {headers.TENANT} %[{_value(KeyField.TENANT)}] if has_key",
        f"http-request set-header {headers.KEY} %[var(txn.key_prefix)] if has_key",
        *_counted_rules(),
        *_class_rules(),
    ]


def _counted_rules() -> list[str]:
    """Whether the control plane sent this request, and it was counted where it came in: it proves that by the text
    that it alone has for the same key. Declares `is_counted`."""
    record = f"req.hdr({headers.COUNTED}),sha2(256),hex,lower,map_str({KEYS_MAP})"
    is_sender = f"{{ var(txn.counted),field({KeyField.SENDER.value},{SEPARATOR}) 1 }}"
    is_same = f"{{ var(txn.counted),field({KeyField.PREFIX.value},{SEPARATOR}),strcmp(txn.key_prefix) eq 0 }}"
    return [
        f"http-request set-var(txn.counted) {record} if {{ req.hdr({headers.COUNTED}) -m found }}",
        f"http-request del-header {headers.COUNTED}",
        f"http-request set-var(txn.is_counted) bool(true) if has_key {is_sender} {is_same}",
        "acl is_counted var(txn.is_counted) -m bool",
    ]


def scope_rules() -> list[str]:
    """Whether the key opens the pool."""
    return [
        f"acl key_opens_pool var(txn.key_prefix),concat(/,txn.pool),map_str({KEYS_MAP}) -m found",
        f"{responses.return_rule(MODEL_NOT_ALLOWED)} if has_key {_IS_SCOPED} !key_opens_pool",
    ]


def listing_rules(condition: str) -> list[str]:
    """Only keys with a scope come to the script, which leaves out what they do not open."""
    return [f"http-request lua.list_models if {condition} has_key {_IS_SCOPED}"]


def unparsed_body_scope_rule() -> str:
    """The model of a large request is not known yet: that its key is scoped goes with it to where it will be."""
    return f"http-request set-header {headers.KEY} %[var(txn.key_prefix)]|1 if {_HAS_KEY} {_IS_SCOPED}"


def parsed_body_scope_rules() -> list[str]:
    """Whether the key opens the pool, once a body parser has found the model of a large request."""
    return [
        f"http-request set-var(txn.key_prefix) req.hdr({headers.KEY}),field(1,|)",
        f"http-request set-var(txn.key_scoped) req.hdr({headers.KEY}),field(2,|)",
        f"http-request set-header {headers.KEY} %[var(txn.key_prefix)] if {{ var(txn.key_scoped) -m found }}",
        f"acl key_opens_pool var(txn.key_prefix),concat(/,txn.pool),map_str({KEYS_MAP}) -m found",
        f"{responses.return_rule(MODEL_NOT_ALLOWED)} if has_pool {{ var(txn.key_scoped) -m found }} !key_opens_pool",
    ]


def admission_rules() -> list[str]:
    """Limits of the key, before anything of the body is read: what is refused for its body counts, too, so nobody makes
    the ingress read bodies beyond a limit. Only keys with limits come to the script, which counts and refuses."""
    return [
        f"http-request track-sc0 var(txn.key_prefix) table {KEY_TABLE} if {_HAS_KEY} !is_counted",
        f"http-request lua.admit_key if {_HAS_KEY} {{ {_value(KeyField.LIMITED)} 1 }}",
        *_over_limit_rules(),
        "http-response lua.settle_key if { var(txn.limited) -m found }",
        f"http-after-response sc-inc-gpc(1,0) if {_HAS_KEY} {{ status ge 500 }}",
    ]


def token_rules() -> list[str]:
    """The limit of tokens, which only the body tells; the last of all checks."""
    charges = "{ var(txn.charges) -m found }"
    return [f"http-request lua.charge_tokens if {charges}", *(f"{rule} {charges}" for rule in _over_limit_rules())]


def _over_limit_rules() -> list[str]:
    return [
        f"http-request sc-inc-gpc(0,0) if {_IS_OVER_LIMIT}",
        f"http-request use-service lua.refuse if {_IS_OVER_LIMIT}",
    ]


def meter_lines(*, features: bool) -> list[str]:
    """The filter that counts the tokens of responses. It costs every request a third more, so it is there only while
    some key has a limit of tokens; the first such key costs a reload."""
    return ["filter lua.token_meter"] if features else []


def key_store() -> str:
    """The section that holds the counts of keys."""
    expire = f"expire {KEY_TABLE_EXPIRE_S}s"
    table = f"stick-table type string len 16 size {KEY_TABLE_ENTRIES} {expire} store {COUNTERS}"
    return section(f"backend {KEY_TABLE}", [table])


def _class_rules() -> list[str]:
    """A request more urgent than its key allows is made as urgent as it does: work is not refused for a priority."""
    classes = list(ServingClass)
    rules = []
    for urgency, ceiling in enumerate(classes[1:], start=1):
        is_ceiling = f"{{ {_value(KeyField.URGENCY)} {urgency} }}"
        is_allowed = f"{{ req.hdr({headers.CLASS}) {' '.join(classes[urgency:])} }}"
        rules.append(f"http-request set-header {headers.CLASS} {ceiling} if has_key {is_ceiling} !{is_allowed}")
    return rules
