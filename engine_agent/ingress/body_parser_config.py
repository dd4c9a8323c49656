"""The configuration of a body parser: a small HAProxy that finds the model in large bodies, no more. Pure.

HAProxy reads and replays no more of a request than one buffer holds, all buffers of a process are of one size, and a
request that may be replayed costs a copy of a whole buffer: 0.3 ms for 4 MiB, however short it is. So the HAProxy that
serves has buffers for short bodies, and each body parser for longer ones (`settings.BODY_PARSERS`). Of the table a
parser knows only the names of models: it picks no cell and refuses no name. It alone has a large request whole, so it
sends it again, from the start, when it learns that no cell answered.
"""

from engine_agent.ingress import affinity, headers, hops, responses, stored_responses
from engine_agent.ingress.desired import DesiredHaproxy
from engine_agent.ingress.sections import (
    PARSED_SOCKET,
    PARSER_SOCKET,
    PROMPT_PREFIXES_LUA,
    UNANSWERED_STATUS,
    defaults_section,
    digest_of,
    global_section,
    max_parsed_body_bytes,
    model_rules,
    refuse_longer_than,
    replay_rule,
    section,
    shape_rules,
)
from engine_agent.ingress.settings import BodyParserTier, IngressSettings


def render_body_parser(desired: DesiredHaproxy, settings: IngressSettings, tier: BodyParserTier) -> str:
    """The whole configuration of one body parser. Its description is `body_parser_structure_of` the same input."""
    return _render(desired, settings, tier, body_parser_structure_of(desired, settings, tier))


def body_parser_structure_of(desired: DesiredHaproxy, settings: IngressSettings, tier: BodyParserTier) -> str:
    return digest_of(_render(desired, settings, tier, ""))


def _render(desired: DesiredHaproxy, settings: IngressSettings, tier: BodyParserTier, structure: str) -> str:
    return "\n".join(
        [
            "# Written by the ingress agent; what is changed here is lost.",
            global_section(
                settings,
                structure,
                [responses.too_large(desired.max_body_bytes)],
                body_bytes=max_parsed_body_bytes(desired, tier),
                max_connections=settings.max_connections,
                threads=1,
                extra_lines=[f"lua-load-per-thread {PROMPT_PREFIXES_LUA}"],
            ),
            defaults_section(desired, settings),
            section("frontend parser", _frontend(desired, settings)),
            section("backend parsed", _backend(desired, settings, tier)),
        ]
    )


def _frontend(desired: DesiredHaproxy, settings: IngressSettings) -> list[str]:
    return [
        settings.own_socket(PARSER_SOCKET),
        *responses.form_rules(),
        f"http-request wait-for-body time {settings.times.request_body_s}s",
        *refuse_longer_than(desired.max_body_bytes, "req.body_size"),
        *model_rules(after=["http-request use-service lua.refuse if { var(txn.refusal) -m found }"]),
        *shape_rules(),
        *stored_responses.parser_rules(settings),
        # Each query of the body takes as long as finding the model, so headers state whether the affinity key and the
        # digest are needed. The HAProxy that serves says so, not this file: the two never have to be of one table.
        f"acl wants_key req.hdr({headers.AFFINITY}) -m found",
        *affinity.key_rules(),
        *affinity.prefix_rules_of_parser(),
        f"http-request del-header {headers.AFFINITY}",
        f"http-request set-header {headers.AFFINITY} %[var(txn.affinity)] if {{ var(txn.affinity) -m found }}",
        f"http-request set-header {headers.BODY} %[{hops.BODY_DIGEST}] if {{ req.hdr({headers.BODY}) -m found }}",
        # Encoded, because a name out of a body may hold line ends.
        f"http-request set-header {headers.MODEL} %[var(txn.model),url_enc]",
        "default_backend parsed",
    ]


def _backend(desired: DesiredHaproxy, settings: IngressSettings, tier: BodyParserTier) -> list[str]:
    return [
        f"retry-on conn-failure empty-response {UNANSWERED_STATUS}",
        replay_rule(settings, body_bytes=max_parsed_body_bytes(desired, tier)),
        f"server parsed unix@../{PARSED_SOCKET} pool-max-conn 0",
    ]
