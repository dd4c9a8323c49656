"""The blocks that real vLLM lists are those that it finds: prompts that fill the cache and evict each other are sent
again, and the index predicts for each how many tokens are found. Salts separate tenants."""

from collections.abc import Iterator

import msgspec

from engine_agent.protocol.proxy_messages import (
    CACHE_SCOPE_HEADER,
    EVENTS_PATH,
    EXCHANGE_HEADER,
    USAGE_PATH,
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    ExchangeUsage,
    decode_blocks,
)
from tests.asking import CLIENT
from tests.engine_agent.engines.vllm.running_cell import ANSWER_LIMIT_S, RunningCell

PROMPTS = 10
"""Of some 600 tokens each, where the cache has room for some 4,000."""
WORDS = ("river", "stone", "cloud", "paper", "glass", "wheel", "bread", "light")


def prompt(number: int) -> str:
    return f"List {number}: " + " ".join(WORDS[(number + at * at) % len(WORDS)] for at in range(550))


class Index:
    """Follows an engine's events; `chains` are the blocks of its exchanges."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._life, self._upto = "", 0
        self.block_tokens = 0
        self._parents: dict[int, int] = {}
        self.chains: dict[str, list[int]] = {}

    def read(self) -> None:
        answer = CLIENT.get(f"{self._url}{EVENTS_PATH}?life={self._life}&after={self._upto}", timeout=ANSWER_LIMIT_S)
        changes = decode_blocks(answer.content)
        if changes.is_whole:
            self._parents.clear()
        for event in changes.events:
            match event:
                case BlocksStored(parent, blocks, exchange):
                    chain = self.chains.setdefault(exchange, list(self._before(parent)))
                    chain.extend(blocks)
                    for block in blocks:
                        self._parents[block] = parent
                        parent = block
                case BlocksRemoved(blocks):
                    for block in blocks:
                        self._parents.pop(block, None)
                case CacheCleared():
                    self._parents.clear()
        self._life, self._upto, self.block_tokens = changes.life, changes.upto, changes.block_tokens

    def _before(self, block: int) -> Iterator[int]:
        chain: list[int] = []
        while block:
            chain.append(block)
            block = self._parents[block]
        return reversed(chain)

    def leading(self, chain: list[int]) -> int:
        """How many leading ones of these blocks are cached."""
        return next((at for at, block in enumerate(chain) if block not in self._parents), len(chain))


def compute(engine: RunningCell, number: int, exchange: str, scope: str = "") -> ExchangeUsage:
    """Has the prompt of this number read, and one token generated."""
    headers = {EXCHANGE_HEADER.decode(): exchange, **({CACHE_SCOPE_HEADER.decode(): scope} if scope else {})}
    body = {"model": "smollm2", "prompt": prompt(number), "max_tokens": 1}
    answer = CLIENT.post(f"{engine.url}/v1/completions", json=body, headers=headers, timeout=ANSWER_LIMIT_S)
    assert answer.status_code == 200, answer.text
    used = CLIENT.get(f"{engine.url}{USAGE_PATH}?exchange={exchange}", timeout=ANSWER_LIMIT_S)
    return msgspec.json.decode(used.content, type=ExchangeUsage)


def the_index_is_what_the_engine_has_cached(engine: RunningCell) -> None:
    index = Index(engine.url)
    index.read()
    used: dict[str, ExchangeUsage] = {}
    for number in range(PROMPTS):
        used[f"e-{number}"] = compute(engine, number, f"e-{number}")
        _follow(index, f"e-{number}", used[f"e-{number}"])
    lost = found = 0
    for number in range(PROMPTS - 1, -1, -1):
        before = used[f"e-{number}"]
        chain = index.chains[f"e-{number}"][: (before.prompt_tokens - 1) // index.block_tokens]
        expected = index.leading(chain)
        again = compute(engine, number, f"again-{number}")
        assert again.cached_tokens == expected * index.block_tokens, number
        found += expected
        lost += len(chain) - expected
        if expected < len(chain):
            _follow(index, f"again-{number}", again)
    assert found, "the last prompts are still there"
    assert lost, "the first ones are not: the cache is smaller than all of them"


def _follow(index: Index, exchange: str, used: ExchangeUsage) -> None:
    """Reads until all blocks of the prompt have arrived; evictions for them arrive before."""
    while len(index.chains.get(exchange, ())) < used.prompt_tokens // index.block_tokens:
        index.read()


def tenants_find_their_own_prompts_only(engine: RunningCell) -> None:
    scopes = ("tenant:acme", "tenant:umbrella")
    first = [compute(engine, 90, f"{scope}-1", scope).cached_tokens for scope in scopes]
    again = [compute(engine, 90, f"{scope}-2", scope).cached_tokens for scope in scopes]
    assert first == [0, 0]
    assert min(again) > 0
