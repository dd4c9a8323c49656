"""Rules by which batch requests enter a cell beside real-time ones, each a pure decision on what it may know."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from engine_agent.engines.sim.batching import ModelParameters
from engine_agent.protocol.states import ServingClass
from engine_agent.proxy.batch_window import BatchAdmission, BatchWindow, RealtimeLatency, decide_batch
from engine_agent.proxy.rewrite import PRIORITIES

BATCH = PRIORITIES[ServingClass.BATCH]
POLL_S = 5.0
"""Between two looks of llm-d's gates at their metrics: a scrape."""


@dataclass(frozen=True, slots=True)
class CellState:
    """What a rule may know. `waiting`: requests in the engine's queue; `kv_share`: of its cache in use, 0 to 1;
    `unread`: batch requests before their first token."""

    now_s: float
    batch: int
    unread: int
    waiting: int
    kv_share: float


@dataclass
class Rule:
    """No rule: as many batch requests as the engine takes at once, like all others."""

    slots: int
    priority: int = 0
    batch_prompt_tokens: int = 0

    def parameters(self, cell: ModelParameters) -> ModelParameters:
        return replace(cell, batch_prompt_tokens=self.batch_prompt_tokens)

    def admits(self, state: CellState) -> bool:
        """Whether one more batch request goes to the engine now."""
        return state.batch < self.slots

    def steer(self, measured: RealtimeLatency, *, had_batch: bool) -> None:
        """The cell's real-time latency since the last step."""


@dataclass
class Alone(Rule):
    """No batch work."""

    def admits(self, state: CellState) -> bool:
        return False


@dataclass
class Gates(Rule):
    """llm-d's, as its documents describe them: nothing is sent while the pool is saturated (0.8 or more), and else a
    budget of N = pods x max_concurrency x (D - B) requests a look, D the share of the pool that is free, B 0.05.

    Saturation is the larger of queue depth by 5 and use of the cache by 0.8, as the picker's detector has it.
    """

    max_concurrency: int = 100
    _looked_s: float = -POLL_S
    _budget: int = 0

    def admits(self, state: CellState) -> bool:
        if state.now_s - self._looked_s >= POLL_S:
            self._looked_s = state.now_s
            saturation = max(state.waiting / 5, state.kv_share / 0.8)
            self._budget = 0 if saturation >= 0.8 else round(self.max_concurrency * (1 - saturation - 0.05))
        if self._budget <= 0:
            return False
        self._budget -= 1
        return True


@dataclass
class Guest(Rule):
    """Ours: a window by the cell's own baseline and the order of classes in the engine, or, where an engine has none,
    one batch prompt being read. `window` None: without it; `one_prompt` False: without that limit."""

    window: BatchWindow | None = None
    one_prompt: bool = True
    was_full: bool = field(default=False)

    def admits(self, state: CellState) -> bool:
        limit = self.slots if self.window is None else self.window.limit
        unread = state.unread if self.one_prompt else 0
        decided = decide_batch(running=state.batch, unread=unread, waiting=0, limit=limit)
        self.was_full |= state.batch >= limit
        return decided is BatchAdmission.BEGIN

    def steer(self, measured: RealtimeLatency, *, had_batch: bool) -> None:
        if self.window is not None:
            self.window.steer(measured, had_batch=had_batch, was_full=self.was_full)
        self.was_full = False


def rule_of(name: str, slots: int, tokens: int) -> Rule:
    """A new rule by its name. `slots`: of the cell; `tokens`: of batch prompts in a step, for ours.

    Raises:
        ValueError: there is none of this name.
    """
    most = slots - -(-slots // 4)
    made: dict[str, Callable[[], Rule]] = {
        "alone": lambda: Alone(0),
        "no rule": lambda: Rule(slots),
        "75 % of slots": lambda: Rule(most),
        "priority only": lambda: Rule(slots, priority=BATCH),
        "llm-d gates": lambda: Gates(slots),
        "one prompt": lambda: Guest(most, BATCH),
        "one prompt, window": lambda: Guest(most, BATCH, window=BatchWindow(most)),
        "classes": lambda: Guest(most, BATCH, tokens, one_prompt=False),
        "guest": lambda: Guest(most, BATCH, tokens, window=BatchWindow(most), one_prompt=False),
    }
    if name not in made:
        raise ValueError(f"there is no rule {name!r}; there are {', '.join(made)}")
    return made[name]()
