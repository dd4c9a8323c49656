"""Least squares without negative coefficients, out of sums of products alone. Pure.

For the few terms that are used here each subset of them is solved (Lawson and Hanson, "Solving Least Squares Problems",
1974, prove that the best is one of these). A sample weighs by 1 / its target: errors of a sum grow with its root.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

PIVOT_LEAST = 1e-9
"""Of a matrix whose diagonal is 1: below it two terms cannot be told apart."""
BETTER = 1e-12
"""By what share of all squares a larger subset has to leave less."""


@dataclass(frozen=True, slots=True)
class Solution:
    """The best coefficients of these terms alone, none below 0; those of other terms are 0. `inverse`: of the terms'
    products, each term scaled to 1. `left`: the squares that they leave over."""

    terms: tuple[int, ...]
    scale: tuple[float, ...]
    scaled: tuple[float, ...]
    inverse: tuple[tuple[float, ...], ...]
    left: float

    def value(self, term: int) -> float:
        return self.scaled[self.terms.index(term)] / self.scale[self.terms.index(term)] if term in self.terms else 0.0

    def error_of(self, gradient: Sequence[float], samples: int) -> float:
        """The standard error of what grows with the coefficients by this gradient."""
        spread = self.left / max(1, samples - len(self.terms))
        slope = [gradient[term] / scale for term, scale in zip(self.terms, self.scale, strict=True)]
        variance = spread * sum(
            one * cell * other
            for one, row in zip(slope, self.inverse, strict=True)
            for cell, other in zip(row, slope, strict=True)
        )
        return math.sqrt(max(0.0, variance))


def weighed(terms: Sequence[float], target: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """What one sample adds to the products, the upper half row by row, and to the targets; its target, above 0, is what
    it adds to the squares."""
    size = range(len(terms))
    products = tuple(terms[row] * terms[column] / target for row in size for column in size[row:])
    return products, tuple(float(term) for term in terms)


def solve(products: Sequence[float], targets: Sequence[float], square: float, terms: int) -> Solution | None:
    """The best of all subsets of the terms, of equals the smaller one; None: none can be told."""
    matrix = _matrix(products, terms)
    used = [term for term in range(terms) if matrix[term][term] > 0]
    best: Solution | None = None
    for size in range(1, len(used) + 1):
        for subset in combinations(used, size):
            found = _solved(subset, matrix, targets, square)
            if found is not None and (best is None or found.left < best.left - BETTER * square):
                best = found
    return best


def _solved(
    terms: tuple[int, ...], matrix: list[list[float]], targets: Sequence[float], square: float
) -> Solution | None:
    scale = {term: math.sqrt(matrix[term][term]) for term in terms}
    inverse = _inverse([[matrix[row][column] / scale[row] / scale[column] for column in terms] for row in terms])
    if inverse is None:
        return None
    aims = [targets[term] / scale[term] for term in terms]
    scaled = tuple(sum(cell * aim for cell, aim in zip(row, aims, strict=True)) for row in inverse)
    if min(scaled) < 0:
        return None
    left = square - sum(value * aim for value, aim in zip(scaled, aims, strict=True))
    return Solution(terms, tuple(scale.values()), scaled, tuple(map(tuple, inverse)), max(0.0, left))


def _matrix(products: Sequence[float], size: int) -> list[list[float]]:
    matrix = [[0.0] * size for _ in range(size)]
    places = ((row, column) for row in range(size) for column in range(row, size))
    for (row, column), value in zip(places, products, strict=True):
        matrix[row][column] = matrix[column][row] = value
    return matrix


def _inverse(matrix: list[list[float]]) -> list[list[float]] | None:
    """By Gauss and Jordan, with the largest pivot; None: there is none worth the name."""
    size = len(matrix)
    rows = [[*row, *(float(number == place) for place in range(size))] for number, row in enumerate(matrix)]
    for column in range(size):
        pivot = max(range(column, size), key=lambda row: abs(rows[row][column]))
        if abs(rows[pivot][column]) < PIVOT_LEAST:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        rows[column] = [value / rows[column][column] for value in rows[column]]
        for row in range(size):
            if row != column:
                factor = rows[row][column]
                rows[row] = [value - factor * base for value, base in zip(rows[row], rows[column], strict=True)]
    return [row[size:] for row in rows]
