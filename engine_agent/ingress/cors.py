"""Pages of other origins: which of them may use a key from a browser, as the Fetch standard has it ("CORS protocol").
Pure text, rendered only while some key lists an origin.

A preflight shows no key, so it is answered for the origins of all keys together; the answer itself may be read by a
page only if its own key lists the page's origin. Anybody else gets the same answers without these headers, which a
browser then keeps from the page.
"""

from engine_agent.ingress import headers
from engine_agent.ingress.api_paths import HEALTH_PATHS, MODELS_PATH, control_plane_paths
from engine_agent.ingress.key_map import ANY_KEY, KEY_ORIGIN, KEYS_MAP
from engine_agent.protocol.api_surface import CELL_PATHS

METHODS = "GET, HEAD, POST, DELETE"
MAX_AGE_S = 600
"""How long a browser need not ask again: as long as an origin may go on after it was taken off a key."""
LIMIT_HEADERS = tuple(
    f"x-ratelimit-{what}-{kind}" for kind in ("requests", "tokens") for what in ("limit", "remaining", "reset")
)
READABLE = (
    *(headers.REQUEST_ID, headers.CELL, headers.REGION, headers.INGRESS, headers.DEPLOYMENT),
    *("Request-Id", "Retry-After", "Retry-After-Ms", "Location", "Allow"),
    *LIMIT_HEADERS,
)
"""Of an answer, beside its body."""
_ORIGIN = "req.fhdr(Origin)"
_IS_READER = "{ var(txn.page) -m found }"


def preflight_rules(*, has_control_plane: bool) -> list[str]:
    """Before any rule that refuses a method: there is no key in a preflight, and nothing of it is done."""
    is_asked = "METH_OPTIONS { req.hdr(Access-Control-Request-Method) -m found }"
    is_listed = f"{{ str({ANY_KEY}),concat({KEY_ORIGIN},txn.asking),map_str({KEYS_MAP}) -m found }}"
    fixed = " ".join((*CELL_PATHS, *HEALTH_PATHS, MODELS_PATH, "/version"))
    kept = [condition for condition, _ in control_plane_paths().values()] if has_control_plane else []
    allowed = {
        "Access-Control-Allow-Origin": "%[var(txn.asking)]",
        "Access-Control-Allow-Methods": METHODS,
        "Access-Control-Allow-Headers": "%[req.fhdr(Access-Control-Request-Headers)]",
        "Access-Control-Max-Age": str(MAX_AGE_S),
    }
    answer = "http-request return status 204" + "".join(f" hdr {name} '{text}'" for name, text in allowed.items())
    return [
        f"http-request set-var(txn.asking) {_ORIGIN} if METH_OPTIONS",
        *(
            f"{answer} if {is_asked} {is_listed} {condition}"
            for condition in (f"{{ path {fixed} }}", f"{{ path_beg {MODELS_PATH}/ }}", *kept)
        ),
    ]


def reader_rules() -> list[str]:
    """After the rules that identify the caller: whether the page may read the answer."""
    is_listed = f"{{ var(txn.key_prefix),concat({KEY_ORIGIN},txn.page),map_str({KEYS_MAP}) -m found }}"
    return [
        f"http-request set-var(txn.page) {_ORIGIN} if {{ {_ORIGIN} -m found }}",
        f"http-request unset-var(txn.page) if {_IS_READER} !{is_listed}",
    ]


def answer_rules() -> list[str]:
    """For every answer: caches must keep those of different origins apart."""
    rule = "http-after-response set-header"
    return [
        f"{rule} Access-Control-Allow-Origin %[var(txn.page)] if {_IS_READER}",
        f"{rule} Access-Control-Expose-Headers '{', '.join(READABLE)}' if {_IS_READER}",
        "http-after-response add-header Vary Origin",
    ]
