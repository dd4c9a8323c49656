"""Headers that applications, ingresses and cells speak in. Names only; a header means what its docstring says."""

from typing import Final

HOP: Final = "X-Switchyard-Hop"
"""On a request that another region's ingress sent here: it must be served here or not at all."""
HELD: Final = "X-Switchyard-Held-Since-Ms"
"""On a request that no cell can take and that may be held: when it came, in milliseconds since 1970. An application's
own value is removed."""
WORKER: Final = "X-Switchyard-Worker"
"""On a request of a pool whose requests may be held: the pid of the worker that has it, or whose queue it is in. During
a reload there are several."""
CLASS: Final = "X-Switchyard-Class"
"""A request may be less urgent than its pool, never more."""
CELL: Final = "X-Switchyard-Cell"
"""On a response: the cell that gave it."""
SERVER: Final = "X-Switchyard-Server"
"""On a request to a cell: which start of which cell it is for; another refuses it."""
RETRY: Final = "X-Switchyard-Retry"
"""On a cell's 503: it did not send the request to its engine."""
ERROR: Final = "X-Switchyard-Error"
"""On a 5xx of ours: its code, by which the ingress that the client asked counts it."""
UNSERVED: Final = "X-Switchyard-Unserved"
"""On an answer of the frontend that stands in for cells: it is a 503 that must not be sent again from here."""
REGION: Final = "X-Switchyard-Region"
"""On a response: the region of that cell."""
INGRESS: Final = "X-Switchyard-Ingress"
"""On a response: the ingress that chose the cell. Where regions were crossed it is not the one that was asked."""
TENANT: Final = "X-Switchyard-Tenant"
"""On a request: whose it is, by its key. An application's own value is removed."""
KEY: Final = "X-Switchyard-Key"
"""On a request to a cell: the prefix of the key that it came with. On its way through a body parser: that, and `|1`
behind it where the key does not open every pool. An application's own value is removed."""
MODEL: Final = "X-Switchyard-Model"
"""On a request that a body parser sends back, and on its response: the model, URL-encoded as it came out of a body. On
a request to a cell, too: it refuses a body in which it finds another."""
ADAPTER: Final = "X-Switchyard-Adapter"
"""On a request to a cell: the model's name is this adapter's, URL-encoded; a cell that has none such refuses it."""
BODY: Final = "X-Switchyard-Body"
"""On a request to a body parser: the digest of its body is of use, because marks of other regions are for it. On one
that a body parser sends back: that digest."""
STORED: Final = "X-Switchyard-Stored"
"""On a large request that a body parser sends back: it needs what the control plane keeps. On the control plane's
response to such a request: `counted`, it sent the request on, whose tokens were charged there; `later`, it will, and
the request counts then."""
COUNTED: Final = "X-Switchyard-Counted"
"""On a request to the control plane that must be kept: a proof that an ingress has counted it against its key. On the
request that it sends on: its own proof of that."""
POOL: Final = "X-Switchyard-Pool"
"""Beside a proven hop mark: the backend of the pool that the request is for."""
ATTEMPT: Final = "X-Switchyard-Attempt"
"""On a request that may be sent again within an ingress: which request it is an attempt of."""
OVERFLOW: Final = "X-Switchyard-Overflow"
"""Beside a hop mark: the region that it comes from has cells, and could not take the request. It must not displace
others."""
TRAIL: Final = "X-Switchyard-Trail"
"""On a response that goes on within an ingress: what its request met behind here, for the access log."""
LIMITS: Final = "X-Switchyard-Limits"
"""On a request to a cell: which limits of one request's work differ from the defaults."""
DEPLOYMENT: Final = "X-Switchyard-Deployment"
"""On a request to a cell: the model's name led here, so the engine's own name may take its place. On a response:
the deployment that gave it."""
SESSION: Final = "X-Session-Id"
"""On a request: which conversation it belongs to."""
AFFINITY: Final = "X-Switchyard-Affinity"
"""On a request to a body parser: its affinity key is of use. On one that a body parser sends back: the hash of that
key."""
OF_CACHES: Final = "X-Switchyard-Cache-"
"""How the names of those begin that are about caches; an application's own are removed."""
PREFIXES: Final = "X-Switchyard-Cache-Prefixes"
"""On a request to a cell: hashes of the beginnings of its text (`prompt_prefixes.lua`), by which the cell learns what
its engine's blocks are of. On a request to a body parser: they are of use. On one that a body parser sends back: they,
not of any tenant yet."""
MATCHED: Final = "X-Switchyard-Cache-Matched"
"""On a request to a cell: how many bytes of its text that cell is to have in its cache."""
CACHE_SCOPE: Final = "X-Switchyard-Cache-Scope"
"""On a request to a cell: whose prompts in the engine's cache it may find; those of nobody else."""
DEADLINE: Final = "X-Switchyard-Deadline-Ms"
"""On a request: within how many milliseconds it is of use."""
ARRIVED: Final = "X-Switchyard-Arrived-Ms"
"""Beside a deadline: when the first ingress had the request, in milliseconds since 1970; what it waited counts."""
API_KEY: Final = "X-Api-Key"
"""Where clients of Anthropic's API show their key; `Authorization` says the same."""
ONCE: Final = (CLASS, DEADLINE, ARRIVED, TENANT, HOP, POOL, SESSION, "Authorization", API_KEY)
"""What decides about a request: of two, one reader would take the first and another the last."""
OWN_PREFIX: Final = "X-Switchyard-"
"""How the names of our own headers begin."""
FROM_CLIENTS: Final = (CLASS, DEADLINE, COUNTED)
"""Own headers that a client may send. `COUNTED` counts only with its proof."""
FROM_INGRESSES: Final = (HOP, POOL, TENANT, ARRIVED, OVERFLOW)
"""Own headers that another region's ingress may send, and that count only with a proven hop mark. An ingress removes
all others from what it receives."""
REQUEST_ID: Final = "X-Request-Id"
PROMPT_TOKENS: Final = "X-Switchyard-Prompt-Tokens"
COMPLETION_TOKENS: Final = "X-Switchyard-Completion-Tokens"
"""On a cell's response, if it knew them before it began: prompt and completion tokens."""
