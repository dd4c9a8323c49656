"""Checks that the processors and accelerators of this node compute correctly.

`python -m engine_agent.node.checks.compute --seconds N` prints one line of JSON per check. It runs in an engine's own
Python, which may have torch, numpy or neither.

It multiplies whole numbers whose sums fit, so every order of addition gives the same bits and any difference is a
fault. A product is checked by Freivalds' method, A(Bx) = (AB)x, with vectors of -1 and 1, and every repetition must
give the same bits as the first."""

import argparse
import random
import sys
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any

from engine_agent.node.checks.result import Result, printed, timed

SIDE = 512
GPU_SIDE = 4096
WITHIN = 8
"""Entries are whole numbers from -8 to 8: sums of 4,096 products stay below 2^24, which a float32 represents
exactly."""
DEVICE_MEMORY_SHARE = 0.5
DEVICE_MEMORY_MOST = 8 * 1024**3
RIGHT = "every product is exact and the same in every repetition"
BYTES = (0x00, 0xFF, 0x55, 0xAA)


def checks(seconds: float) -> Iterator[Result]:
    try:
        import torch
    except ImportError:
        torch = None
    if torch is None:
        yield timed("matmul cpu", lambda: _numpy_or_plain(seconds))
        return
    yield timed("matmul cpu", lambda: torch_matmul(torch, "cpu", SIDE, seconds))
    if not torch.cuda.is_available():
        return
    for index in range(torch.cuda.device_count()):
        device = f"cuda:{index}"
        yield timed(f"memory {device}", lambda at=device: torch_memory(torch, at, seconds))  # type: ignore[misc]
        yield timed(f"matmul {device}", lambda at=device: torch_matmul(torch, at, GPU_SIDE, seconds))  # type: ignore[misc]


def torch_matmul(torch: Any, device: str, side: int, seconds: float) -> Result:
    """Multiplies whole numbers on a device for this time."""
    name = f"matmul {device}"
    generator = torch.Generator().manual_seed(side)

    def whole(*shape: int) -> Any:
        return torch.randint(-WITHIN, WITHIN + 1, shape, generator=generator).to(device, torch.float32)

    left, right = whole(side, side), whole(side, side)
    signs = (torch.randint(0, 2, (side, 4), generator=generator) * 2 - 1).to(device, torch.float32)
    identity = torch.eye(side, device=device)
    with _exact(torch):
        if not torch.equal(left @ identity, left):
            return Result(name, False, "a matrix times the identity is another matrix", RIGHT)
        first = left @ right
        # In float64: a product times a vector no longer fits a float32.
        if not torch.equal(first.double() @ signs.double(), left.double() @ (right.double() @ signs.double())):
            return Result(name, False, "a product of two matrices is wrong", RIGHT)
        return _repeated(name, side, seconds, lambda: torch.equal(left @ right, first))


def torch_memory(torch: Any, device: str, seconds: float) -> Result:
    """Writes patterns over half of a device's free memory and reads them back on the device."""
    free, total = torch.cuda.mem_get_info(device)
    size = int(min(free * DEVICE_MEMORY_SHARE, DEVICE_MEMORY_MOST))
    memory = torch.empty(size, dtype=torch.uint8, device=device)
    ends_s, rounds = monotonic() + seconds, 0
    for pattern in BYTES:
        memory.fill_(pattern)
        wrong = int((memory != pattern).sum())
        if wrong:
            found = f"{wrong} of {size} bytes of {device} do not hold {pattern:#04x}"
            return Result(f"memory {device}", False, found, "memory returns what was written to it")
        rounds += 1
        if monotonic() >= ends_s:
            break
    mib = size // 2**20
    found = f"{mib} of {total // 2**20} MiB held {rounds} of {len(BYTES)} patterns"
    return Result(f"memory {device}", True, found, numbers={"mib": mib, "patterns": rounds})


class _exact:  # noqa: N801  (a context manager)
    """Multiplies float32 as float32, where a device would use shorter formats."""

    def __init__(self, torch: Any) -> None:
        self._matmul = torch.backends.cuda.matmul
        self._before = self._matmul.allow_tf32

    def __enter__(self) -> None:
        self._matmul.allow_tf32 = False

    def __exit__(self, *_: object) -> None:
        self._matmul.allow_tf32 = self._before


def _repeated(name: str, side: int, seconds: float, is_same: Callable[[], bool]) -> Result:
    began_s, products = monotonic(), 0
    while products == 0 or monotonic() - began_s < seconds:
        if not is_same():
            return Result(name, False, f"product {products + 2} differs from the first", RIGHT)
        products += 1
    spent_s = max(monotonic() - began_s, 1e-6)
    gflops = products * 2 * side**3 / spent_s / 1e9
    found = f"{products} products of {side} x {side} were right, {gflops:.1f} GFLOP/s"
    return Result(name, True, found, numbers={"products": products, "gflop_s": gflops})


def _numpy_or_plain(seconds: float) -> Result:
    try:
        import numpy
    except ImportError:
        return _plain_matmul(seconds)
    numbers = numpy.random.default_rng(SIDE)
    left, right = (numbers.integers(-WITHIN, WITHIN + 1, (SIDE, SIDE)).astype(numpy.float64) for _ in range(2))
    signs = numbers.integers(0, 2, (SIDE, 4)) * 2.0 - 1
    if not numpy.array_equal(left @ numpy.eye(SIDE), left):
        return Result("matmul cpu", False, "a matrix times the identity is another matrix", RIGHT)
    first = left @ right
    if not numpy.array_equal(first @ signs, left @ (right @ signs)):
        return Result("matmul cpu", False, "a product of two matrices is wrong", RIGHT)
    return _repeated("matmul cpu", SIDE, seconds, lambda: bool(numpy.array_equal(left @ right, first)))


def _plain_matmul(seconds: float, side: int = 48) -> Result:
    draw = random.Random(side)
    left, right = ([[draw.randint(-WITHIN, WITHIN) for _ in range(side)] for _ in range(side)] for _ in range(2))
    signs = [draw.choice((-1, 1)) for _ in range(side)]

    def product() -> list[list[int]]:
        columns = list(zip(*right, strict=True))
        return [[sum(a * b for a, b in zip(row, column, strict=True)) for column in columns] for row in left]

    def times(matrix: list[list[int]], vector: list[int]) -> list[int]:
        return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]

    first = product()
    if times(first, signs) != times(left, times(right, signs)):
        return Result("matmul cpu", False, "a product of two matrices is wrong", RIGHT)
    return _repeated("matmul cpu", side, seconds, lambda: product() == first)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m engine_agent.node.checks.compute", description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="approximate time of each check")
    options = parser.parse_args(argv)
    return printed(checks(options.seconds))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
