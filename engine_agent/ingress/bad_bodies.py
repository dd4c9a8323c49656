"""How much reading of bodies that name no model costs at most, whoever sends them. Pure text.

What is fit to be a model's name is found by HAProxy itself, for a thousandth of what a script costs. A script reads
only what is left, and within two budgets: of all together by bytes (`read_body.lua`), and of each source by what was
refused. Requests that name a model where it is found at once meet none of this.
"""

from engine_agent.ingress import headers, responses
from engine_agent.ingress.responses import ErrorResponse
from engine_agent.ingress.sections import section

SOURCE_TABLE = "sources"
"""Backend whose stick table counts what of each source was refused."""
SOURCES = 65_536
"""At a time; beyond that those idle for longest are forgotten. 8 MB when full."""
PERIOD_S = 10
REFUSED_BYTES_PER_PERIOD = 128 * 1024
"""Of one source. A client with a mistake in it gets a dozen answers a second that say what is wrong."""
LEAST_BYTES = 1024
"""What one refused body counts at least; reading and answering it costs that much, however short it is."""
LARGE_BYTES = 16_384
"""What a refused body counts that a body parser had."""
TOO_MANY = ErrorResponse(
    429,
    "rate_limit_exceeded",
    "too many request bodies of this address were refused; the next one is read in some seconds",
    None,
    PERIOD_S,
)
_IS_OVER = f"{{ sc_gpc_rate(0,1) gt {REFUSED_BYTES_PER_PERIOD} }}"


def source_rules(condition: str) -> list[str]:
    """Refuse what meets `condition` of a source that was refused too much; its body may not have arrived. What another
    region's ingress sent was counted there."""
    unmarked = f"{condition} !is_marked"
    return [
        f"http-request track-sc1 src table {SOURCE_TABLE} if {unmarked}",
        responses.refuse_rule(TOO_MANY, f"{unmarked} {_IS_OVER}"),
    ]


def refused_rules() -> list[str]:
    """After the script: count what it refused, and refuse what it did not read."""
    return [
        f"http-request sc-add-gpc(0,1) req.body_size,add({LEAST_BYTES})"
        " if { var(txn.body_error) -m found } { sc1_tracked }",
        "http-request use-service lua.refuse if { var(txn.refusal) -m found }",
    ]


def refused_by_parser_rules() -> list[str]:
    """Count what a body parser refused: no cell gave that answer."""
    is_refused = f"{{ status 400 }} !{{ res.hdr({headers.CELL}) -m found }} {{ sc1_tracked }}"
    return [f"http-response sc-add-gpc(0,1) {LARGE_BYTES} if {is_refused}"]


def source_store() -> str:
    """The section that holds the counts of sources."""
    table = f"stick-table type ipv6 size {SOURCES} expire {3 * PERIOD_S}s store gpc(1),gpc_rate(1,{PERIOD_S}s)"
    return section(f"backend {SOURCE_TABLE}", [table])
