"""The configuration of a reader: a small HAProxy that only finds the model in long bodies. Pure.

HAProxy reads and replays no more of a request than one buffer holds, all buffers of a process are of one size, and a
request that may be replayed costs a copy of a whole buffer: 0.3 ms for 4 MiB, however short it is. So the HAProxy that
serves has buffers for short bodies, and each reader for longer ones (`settings.READERS`). Of the table a reader knows
only the names of models: it picks no cell and refuses no name. It alone has a long request whole, so it sends it again,
from the start, when it is told that no cell answered.
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
    read_bytes,
    refuse_longer_than,
    replay_rule,
    section,
)
from engine_agent.ingress.settings import IngressSettings, ReaderTier


def render_reader(layout: Layout, settings: IngressSettings, tier: ReaderTier) -> str:
    """The whole configuration of one reader. Its description is `reader_structure_of` the same input."""
    return _render(layout, settings, tier, reader_structure_of(layout, settings, tier))


def reader_structure_of(layout: Layout, settings: IngressSettings, tier: ReaderTier) -> str:
    """Digest of the configuration."""
    return digest_of(_render(layout, settings, tier, ""))


def _render(layout: Layout, settings: IngressSettings, tier: ReaderTier, structure: str) -> str:
    return "\n".join(
        [
            "# Written by the ingress agent; what is changed here is lost.",
            global_section(
                settings,
                structure,
                [answers.too_large(layout.max_body_bytes)],
                body_bytes=read_bytes(layout, tier),
                threads=1,
            ),
            defaults_section(layout, settings),
            section("frontend reader", _frontend(layout, settings)),
            section("backend named", _backend(layout, settings, tier)),
        ]
    )


def _frontend(layout: Layout, settings: IngressSettings) -> list[str]:
    return [
        f"bind unix@{READER_SOCKET} mode 600",
        f"http-request wait-for-body time {settings.times.request_body_s}s",
        refuse_longer_than(layout.max_body_bytes, "req.body_size"),
        *model_rules(),
        f"{answers.BAD_BODY_RULE} if {{ var(txn.body_error) -m found }}",
        # Each look into the body takes as long as finding the model, so who sends it here says whether a key is of use.
        f"acl wants_key req.hdr({headers.AFFINITY}) -m found",
        *affinity.key_rules(),
        f"http-request del-header {headers.AFFINITY}",
        f"http-request set-header {headers.AFFINITY} %[var(txn.affinity)] if {{ var(txn.affinity) -m found }}",
        # Encoded, because a name out of a body may hold line ends.
        f"http-request set-header {headers.MODEL} %[var(txn.model),url_enc]",
        "default_backend named",
    ]


def _backend(layout: Layout, settings: IngressSettings, tier: ReaderTier) -> list[str]:
    return [
        f"retry-on conn-failure empty-response {UNSENT_STATUS}",
        replay_rule(settings, body_bytes=read_bytes(layout, tier)),
        f"server named unix@../{NAMED_SOCKET} pool-max-conn 0",
    ]
