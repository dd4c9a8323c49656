"""What a step of an engine costs, fitted to a few measurements, and the goodput that follows from it. Pure.

A step of n sequences that also reads p prompt tokens takes a + b n + c p seconds. With requests of P prompt and O
output tokens at a rate r, Little's law gives n = r O T for a mean step of T seconds, and p = r P T, so that
T = a / (1 - r (c P + b O)): where T reaches the objective between tokens, the rate is (1 - a / itl) / (c P + b O).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from models_registry.planning.workload import Slo


@dataclass(frozen=True, slots=True)
class StepSample:
    """A step, or the mean of many: its sequences, the prompt tokens that it read, and its seconds."""

    sequences: float
    prompt_tokens: float
    seconds: float


@dataclass(frozen=True, slots=True)
class StepModel:
    """Seconds: of any step, for each sequence in it, and for each prompt token that it reads."""

    base_s: float
    per_sequence_s: float
    per_prompt_token_s: float

    def step_s(self, sequences: float, prompt_tokens: float) -> float:
        return self.base_s + self.per_sequence_s * sequences + self.per_prompt_token_s * prompt_tokens

    def goodput(
        self, prompt: float, output: float, slo: Slo, concurrency: int, step_tokens: int | None = None
    ) -> float:
        """Requests a second at which the mean step takes as long as the objective allows, no more are at once than the
        engine runs, and no step has more than `step_tokens`; 0 where even an empty engine is too slow."""
        steps = 1 if step_tokens is None else math.ceil(prompt / max(1, step_tokens))
        prefill_s = (steps - 1) * self.base_s + self.step_s(1, prompt)
        if self.base_s >= slo.itl_s or prefill_s > slo.ttft_s:
            return 0.0
        work_s = self.per_prompt_token_s * prompt + self.per_sequence_s * output
        by_pace = (1 - self.base_s / slo.itl_s) / work_s if work_s > 0 else float("inf")
        # With `concurrency` sequences in every step, each holds its place for `output` of them.
        by_places = 1 / (output * (self.base_s / concurrency + self.per_sequence_s) + self.per_prompt_token_s * prompt)
        # r (prompt + output) tokens come a second, and a step of r (prompt + output) T must not have more than it may.
        by_tokens = (
            float("inf")
            if step_tokens is None
            else step_tokens / (self.base_s * (prompt + output) + step_tokens * work_s)
        )
        return min(by_pace, by_places, by_tokens)


class NoFit(ValueError):
    """The measurements do not tell the parts of a step from each other; the text says what would."""


def fit_step_model(samples: Sequence[StepSample]) -> StepModel:
    """The model that these steps fit best, by least squares of relative errors; parts below zero are zero.

    Raises:
        NoFit: fewer than three, or all alike in sequences or in prompt tokens.
    """
    rows = [(1 / one.seconds, one.sequences / one.seconds, one.prompt_tokens / one.seconds) for one in samples]
    matrix = [[sum(row[i] * row[j] for row in rows) for j in range(3)] for i in range(3)]
    wanted = [sum(row[i] for row in rows) for i in range(3)]
    solved = _solved(matrix, wanted) if len(samples) >= 3 else None
    if solved is None:
        raise NoFit("a step model needs three steps that differ in sequences and in prompt tokens")
    return StepModel(*(max(0.0, part) for part in solved))


@dataclass(frozen=True, slots=True)
class LoadedStep:
    """What a point tells of steps: requests that a cell ended a second, and its mean seconds between tokens."""

    rate: float
    seconds: float


def fit_loaded_steps(points: Sequence[LoadedStep], prompt: float) -> StepModel:
    """The model that points of one workload tell, by least squares of relative errors. In them sequences and prompt
    tokens grow together, so that only the work of a whole request can be told from what each step costs: T = a + r T w.
    All of it is counted by prompt tokens, which gives the same goodput.

    Raises:
        NoFit: fewer than two points, all of one load, or steps that become faster with more load.
    """
    rows = [(1 / one.seconds, one.rate) for one in points if one.seconds > 0 and one.rate > 0]
    aa, ab, bb = sum(a * a for a, _ in rows), sum(a * b for a, b in rows), sum(b * b for _, b in rows)
    sa, sb, whole = sum(a for a, _ in rows), sum(b for _, b in rows), aa * bb - ab * ab
    if len(rows) < 2 or whole <= 1e-6 * aa * bb:
        raise NoFit("a step model needs two points of different load")
    base_s, work_s = (sa * bb - sb * ab) / whole, (aa * sb - ab * sa) / whole
    if work_s <= 0 or base_s <= 0:
        raise NoFit("steps did not become slower with more load: nothing follows for other limits")
    return StepModel(base_s, 0.0, work_s / max(1.0, prompt))


def _solved(matrix: list[list[float]], wanted: list[float]) -> list[float] | None:
    """Three equations by Cramer's rule; None where they do not determine it."""
    whole = _determinant(matrix)
    scale = matrix[0][0] * matrix[1][1] * matrix[2][2]
    if abs(whole) <= 1e-9 * abs(scale):
        return None
    return [
        _determinant(
            [[wanted[row] if column == part else matrix[row][column] for column in range(3)] for row in range(3)]
        )
        / whole
        for part in range(3)
    ]


def _determinant(m: list[list[float]]) -> float:
    return (
        m[0][0] * (m[1][1] * m[2][2] - m[1][2] * m[2][1])
        - m[0][1] * (m[1][0] * m[2][2] - m[1][2] * m[2][0])
        + m[0][2] * (m[1][0] * m[2][1] - m[1][1] * m[2][0])
    )
