"""The configuration of the reader: a second, small HAProxy that only finds the model in long bodies. Pure.

HAProxy reads and replays no more of a request than one buffer holds, all buffers of a process are of one size, and a
request that may be replayed costs a copy of a whole buffer: 0.3 ms and 4 MiB, however short it is. So the HAProxy that
serves has buffers for short bodies, and this one has buffers for the longest. Of the table it knows only the names of
models: it picks no cell and refuses no name. It alone has a long request whole, so it sends the request again, from the
start, when it is told that no cell answered.
"""

from engine_agent.ingress import affinity, answers, headers
from engine_agent.ingress.layout import Layout
from engine_agent.ingress.sections import (
    NAMED_SOCKET,
    READER_SOCKET,
    UNSENT_STATUS,
    defaults_section,
    digest_of,
    global_section,
    model_rules,
    refuse_longer_than,
    replay_rule,
    section,
)
from engine_agent.ingress.settings import IngressSettings


def render_reader(layout: Layout, settings: IngressSettings) -> str:
    """The whole configuration of the reader. Its description is `reader_structure_of` the same input."""
    return _render(layout, settings, reader_structure_of(layout, settings))


def reader_structure_of(layout: Layout, settings: IngressSettings) -> str:
    """Digest of the configuration."""
    return digest_of(_render(layout, settings, ""))


def _render(layout: Layout, settings: IngressSettings, structure: str) -> str:
    return "\n".join(
        [
            "# Written by the ingress agent; what is changed here is lost.",
            global_section(
                settings,
                structure,
                [answers.too_large(layout.max_body_bytes)],
                body_bytes=layout.max_body_bytes,
                threads=1,
            ),
            defaults_section(layout, settings),
            section("frontend reader", _frontend(layout, settings)),
            section("backend named", _backend(layout, settings)),
        ]
    )


def _frontend(layout: Layout, settings: IngressSettings) -> list[str]:
    return [
        f"bind unix@{READER_SOCKET} mode 600",
        f"http-request wait-for-body time {settings.times.request_body_s}s",
        refuse_longer_than(layout.max_body_bytes, "req.body_size"),
        *model_rules(),
        f"{answers.BAD_BODY_RULE} if {{ var(txn.body_error) -m found }}",
        "acl wants_key always_true",
        *affinity.key_rules(),
        f"http-request set-header {headers.AFFINITY} %[var(txn.affinity)] if {{ var(txn.affinity) -m found }}",
        # Encoded, because a name out of a body may hold line ends.
        f"http-request set-header {headers.MODEL} %[var(txn.model),url_enc]",
        "default_backend named",
    ]


def _backend(layout: Layout, settings: IngressSettings) -> list[str]:
    return [
        f"retry-on conn-failure empty-response {UNSENT_STATUS}",
        replay_rule(settings, body_bytes=layout.max_body_bytes),
        f"server named unix@../{NAMED_SOCKET} pool-max-conn 0",
    ]
