"""Breadth-first search over the states of a model: how many there are, what breaks in them, and whether from each some
way leads to the end."""

from collections import deque
from dataclasses import dataclass, field

from simulator.model_checker.model import Model
from simulator.model_checker.state import FaultBudget


@dataclass
class SearchResult:
    """`is_complete`: no state was left out. `stuck`: states from which no way leads to the end."""

    states: int = 0
    ends: int = 0
    is_complete: bool = True
    stuck: int = 0
    violations: list[str] = field(default_factory=list)

    def summary(self, budget: FaultBudget) -> str:
        """In one line."""
        return (
            f"{self.states} states with {budget}{'' if self.is_complete else ' (not all)'}: "
            f"{len(self.violations)} broken, {self.stuck} without a way to the end"
        )


def search(model: Model, budget: FaultBudget, max_states: int = 200_000) -> SearchResult:
    """Visit every state that the budget of faults allows, but no more than `max_states`."""
    first = model.initial(budget)
    result, numbers, waiting = SearchResult(), {first.key: 0}, deque([(0, first)])
    predecessors: list[list[int]] = [[]]
    ends: list[int] = []
    while waiting:
        number, state = waiting.popleft()
        if model.is_end(state):
            ends.append(number)
        for successor in model.successors(state):
            known = numbers.get(successor.key)
            if known is None:
                if len(numbers) >= max_states:
                    result.is_complete = False
                    continue
                known = numbers[successor.key] = len(predecessors)
                predecessors.append([])
                waiting.append((known, successor))
            predecessors[known].append(number)
    result.states, result.ends = len(numbers), len(ends)
    result.stuck = len(numbers) - len(_reaching(predecessors, ends)) if result.is_complete else 0
    result.violations = list(dict.fromkeys(model.violations))
    return result


def _reaching(predecessors: list[list[int]], ends: list[int]) -> set[int]:
    """States from which some way leads to one of the ends."""
    reached, waiting = set(ends), deque(ends)
    while waiting:
        for before in predecessors[waiting.popleft()]:
            if before not in reached:
                reached.add(before)
                waiting.append(before)
    return reached
