"""Application keys in HAProxy's configuration: who a request is from, what its key opens, and how much it may ask for.

Pure text; `config` says where in a frontend each group of rules stands. All that changes with a key is in `KEYS_MAP`,
so keys come and go without a reload and without the control plane in the path of a request. The key itself goes no
further than here: cells are told the tenant.
"""

from engine_agent.ingress import answers, headers
from engine_agent.ingress.answers import Answer
from engine_agent.ingress.classes import ServingClass
from engine_agent.ingress.key_map import KEYS_MAP, REQUIRED_ENTRY, SEPARATOR, KeyField
from engine_agent.ingress.sections import section

KEY_TABLE = "keys"
"""Backend whose stick table counts the requests of each key."""
KEY_TABLE_ENTRIES = 131_072
"""Keys in use at a time; beyond that those idle for longest are forgotten, with their counts. 10 MB when full."""
KEY_TABLE_EXPIRE_S = 86_400
COUNTERS = "conn_cur,http_req_cnt,http_fail_cnt,gpc(1)"
"""Now running, requests, answers of 5xx, and requests over a limit (general purpose counter 0)."""
MISSING_KEY = Answer(
    401, "missing_api_key", "You did not provide an API key: send it as `Authorization: Bearer sw_...`"
)
INVALID_KEY = Answer(401, "invalid_api_key", "Incorrect API key provided: it is unknown, or was revoked")
EXPIRED_KEY = Answer(401, "expired_api_key", "This API key has expired; ask for another one")
MODEL_NOT_ALLOWED = Answer(
    403, "model_not_allowed", "This API key is not for the model `%[var(txn.model),json(utf8s)]`", "model"
)
KINDS = ("requests", "tokens")
"""What is limited per minute."""
MOST_TOKENS_FIELDS = ("max_tokens", "max_completion_tokens")
"""Where a request says how long its answer may be; the newer name counts."""


def identity_rules() -> list[str]:
    """Who asks. A request that another region's ingress sent here was asked there, and says itself for whom it is.

    While keys are not required, whoever shows none of ours is nobody's tenant; a revoked key opens nothing even then.
    """
    return [
        f"http-request del-header {headers.TENANT} if !is_marked",
        f"http-request del-header {headers.KEY}",
        "http-request set-var(txn.key_text) http_auth_bearer if !is_marked",
        "http-request del-header Authorization",
        "acl shows_key var(txn.key_text) -m beg sw_",
        f"http-request set-var(txn.key) var(txn.key_text),sha2(256),hex,lower,map_str({KEYS_MAP}) if shows_key",
        "http-request unset-var(txn.key_text) if !shows_key",
        "acl has_key var(txn.key) -m found",
        f"acl keys_required str({REQUIRED_ENTRY}),map_str({KEYS_MAP}) 1",
        *_field("key_expires", KeyField.EXPIRES_AT),
        *_field("key_prefix", KeyField.PREFIX),
        *_denied(INVALID_KEY, "shows_key !has_key"),
        *_denied(MISSING_KEY, "!has_key !is_marked keys_required"),
        *_denied(EXPIRED_KEY, "has_key { date,sub(txn.key_expires) ge 0 }"),
        f"http-request set-header {headers.TENANT} %[{_value(KeyField.TENANT)}] if has_key",
        *_class_rules(),
    ]


def scope_rules() -> list[str]:
    """Whether the key opens the pool. The model of a long request is not known yet: its key goes with it."""
    is_scoped = f"{{ {_value(KeyField.SCOPED)} 1 }}"
    return [
        f"acl key_opens_pool var(txn.key_prefix),concat(/,txn.pool),map_str({KEYS_MAP}) -m found",
        f"http-request set-header {headers.KEY} %[var(txn.key_prefix)] if has_key is_long {is_scoped}",
        f"{answers.returned(MODEL_NOT_ALLOWED)} if has_key has_pool {is_scoped} !key_opens_pool",
    ]


def named_scope_rules() -> list[str]:
    """The same for a long request, once the reader has found its model."""
    return [
        f"http-request set-var(txn.key_prefix) req.hdr({headers.KEY})",
        f"http-request del-header {headers.KEY}",
        f"acl key_opens_pool var(txn.key_prefix),concat(/,txn.pool),map_str({KEYS_MAP}) -m found",
        f"{answers.returned(MODEL_NOT_ALLOWED)} if has_pool {{ var(txn.key_prefix) -m len gt 0 }} !key_opens_pool",
    ]


def limit_rules() -> list[str]:
    """How much the key may ask for; the last of all questions, so that nothing else that is wrong costs its limits."""
    return [
        f"http-request track-sc0 var(txn.key_prefix) table {KEY_TABLE} if has_key",
        *_field("key_rpm", KeyField.REQUESTS_PER_MIN),
        *_field("key_tpm", KeyField.TOKENS_PER_MIN),
        *_field("key_concurrent", KeyField.MAX_CONCURRENT),
        "acl has_concurrency_limit var(txn.key_concurrent) -m int gt 0",
        "acl too_many_at_once sc_conn_cur(0),sub(txn.key_concurrent) gt 0",
        "http-request set-var(txn.refused_for) str(concurrency) if has_key has_concurrency_limit too_many_at_once",
        *_refusal_of_concurrency("has_key has_concurrency_limit too_many_at_once"),
        *_token_question(),
        "acl has_rate_limit var(txn.key_rpm) -m int gt 0",
        "acl has_rate_limit var(txn.key_tpm) -m int gt 0",
        "acl is_over_limit var(txn.refused_for) -m found",
        "http-request lua.admit_key if has_key has_rate_limit !is_over_limit",
        "http-request sc-inc-gpc(0,0) if is_over_limit",
        *_refused_over_limit("is_over_limit"),
    ]


def answer_rules() -> list[str]:
    """What a limited key is told with every answer, in OpenAI's form, and the settling of its tokens."""
    told = [
        f"http-after-response set-header x-ratelimit-{what}-{kind} %[var(txn.rl_{what}_{kind})]"
        f" if {{ var(txn.rl_{what}_{kind}) -m found }}"
        for kind in KINDS
        for what in ("limit", "remaining", "reset")
    ]
    return ["filter lua.token_meter", "http-response lua.settle_refused if { status ge 400 }", *told]


def key_store() -> str:
    """The section that holds the counts of keys."""
    expire = f"expire {KEY_TABLE_EXPIRE_S}s"
    table = f"stick-table type string len 16 size {KEY_TABLE_ENTRIES} {expire} store {COUNTERS}"
    return section(f"backend {KEY_TABLE}", [table])


def _value(field: KeyField) -> str:
    return f"var(txn.key),field({field.value},{SEPARATOR})"


def _field(variable: str, field: KeyField) -> list[str]:
    return [f"http-request set-var(txn.{variable}) {_value(field)} if has_key"]


def _denied(answer: Answer, condition: str) -> list[str]:
    # The body may not have arrived; a client that is still sending it must be able to hear the answer.
    return answers.refused(answer, condition)


def _class_rules() -> list[str]:
    """A request more urgent than its key allows is made as urgent as it does: work is not refused for a priority."""
    classes = list(ServingClass)
    rules = []
    for urgency, ceiling in enumerate(classes[1:], start=1):
        is_ceiling = f"{{ {_value(KeyField.URGENCY)} {urgency} }}"
        is_allowed = f"{{ req.hdr({headers.CLASS}) {' '.join(classes[urgency:])} }}"
        rules.append(f"http-request set-header {headers.CLASS} {ceiling} if has_key {is_ceiling} !{is_allowed}")
    return rules


def _token_question() -> list[str]:
    """What the estimate of tokens is made of; only a key with a limit of tokens is asked."""
    limited = "has_key { var(txn.key_tpm) -m int gt 0 }"
    rules = [
        f"http-request set-var(txn.prompt_bytes) req.body_size if {limited}",
        f"http-request set-var(txn.prompt_bytes) req.hdr_val(content-length) if {limited} is_long",
    ]
    for name in MOST_TOKENS_FIELDS:
        found = f"req.body,json_query('$.{name}','int')"
        rules.append(f"http-request set-var(txn.max_tokens) {found} if {limited} !is_long {{ {found} -m found }}")
    return rules


def _refusal_of_concurrency(condition: str) -> list[str]:
    limit = "%[var(txn.key_concurrent)]"
    why = f"Rate limit reached on concurrent requests: Limit {limit}. Please try again when one has ended."
    return [
        f"http-request set-var-fmt(txn.refused_why) '{why}' if {condition}",
        f"http-request set-var(txn.refused_s) int(1) if {condition}",
    ]


def _refused_over_limit(condition: str) -> list[str]:
    body = (
        '{"error":{"message":"%[var(txn.refused_why)]","type":"%[var(txn.refused_for)]",'
        '"param":null,"code":"rate_limit_exceeded"}}'
    )
    return [
        f"http-request set-var-fmt(txn.refusal) '{body}' if {condition}",
        f"http-request set-var(txn.refusal_status) int(429) if {condition}",
        f"http-request set-var(txn.refusal_retry_after) var(txn.refused_s) if {condition}",
        f"http-request use-service lua.refuse if {condition}",
    ]
