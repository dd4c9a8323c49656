"""What a step of an engine costs, fitted to a few measurements, and the goodput that follows from it. Pure.

A step of n sequences that also reads p prompt tokens takes a + b n + c p seconds. With requests of P prompt and O
output tokens at a rate r, Little's law gives n = r O T for a mean step of T seconds, and p = r P T, so that
T = a / (1 - r (c P + b O)): where T reaches the objective between tokens, the rate is (1 - a / itl) / (c P + b O).
"""

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

    def goodput(self, prompt: float, output: float, slo: Slo, concurrency: int) -> float:
        """Requests a second at which the mean step takes as long as the objective allows, and no more are at once than
        the engine runs; 0 where even an empty engine is too slow."""
        prefill_s = self.step_s(1, prompt)
        if self.base_s >= slo.itl_s or prefill_s > slo.ttft_s:
            return 0.0
        work_s = self.per_prompt_token_s * prompt + self.per_sequence_s * output
        by_pace = (1 - self.base_s / slo.itl_s) / work_s if work_s > 0 else float("inf")
        # With `concurrency` sequences in every step, each holds its place for `output` of them.
        by_places = 1 / (output * (self.base_s / concurrency + self.per_sequence_s) + self.per_prompt_token_s * prompt)
        return min(by_pace, by_places)


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
