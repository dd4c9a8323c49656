"""Reads Azure's week of 2024 back from the plots of its notebook: requests a second of two services, by quarters of an
hour.

The rows of that trace are in no repository; the notebook beside their description has them drawn, requests a minute
over a week. A pixel is 7.2 minutes wide, and the line covers a range of values in it: their mean, weighted by how much
of each pixel is covered, is what is read. How far off that is in sum can be said, for the notebook says how many
requests there were; series are scaled so that they have as many.

    .venv/bin/python -m bench.azure_week AzureLLMInferenceDataset2024.ipynb > azure_2024_rates.csv
"""

import argparse
import base64
import json
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Array = Any
"""A numpy array."""
WEEK_S = 7 * 86_400
STEP_S = 900
PLOTTED_BY = "plt_invocations_time(df_trace)"
LINE = np.array([31.0, 119.0, 180.0])
"""The colour of matplotlib's first line."""
WHITE = np.array([255.0, 255.0, 255.0])
CHANNELS = {2: 3, 6: 4}
"""Bytes of a pixel by PNG's colour type, at 8 bits each."""


@dataclass(frozen=True, slots=True)
class Series:
    """`title`: of its plot; `requests`: how many the notebook counts; `tick`: the value of the highest grid line."""

    name: str
    title: str
    requests: int
    tick: float


SERIES = (Series("conversation", "Conversation", 27_303_995, 5000.0), Series("code", "Coding", 16_803_691, 6000.0))


def plots(notebook: Path) -> list[Array]:
    """The plots of requests a minute as pixels [row, column, 3], in the notebook's order: code, conversation.

    Raises:
        ValueError: the notebook has no such plots.
    """
    for cell in json.loads(notebook.read_text())["cells"]:
        if PLOTTED_BY in "".join(cell["source"]):
            images = [out["data"]["image/png"] for out in cell["outputs"] if "image/png" in out.get("data", {})]
            return [pixels(base64.b64decode(image)) for image in images]
    raise ValueError(f"{notebook} has no plots by {PLOTTED_BY}")


def pixels(png: bytes) -> Array:
    """A PNG of 8 bits a channel without interlace, over white.

    Raises:
        ValueError: it is another kind of PNG.
    """
    kinds = dict[bytes, bytes]()
    for kind, body in _chunks(png):
        kinds[kind] = kinds.get(kind, b"") + body
    head = kinds[b"IHDR"]
    width, height = int.from_bytes(head[:4], "big"), int.from_bytes(head[4:8], "big")
    depth, colours, interlace = head[8], head[9], head[12]
    if depth != 8 or colours not in CHANNELS or interlace:
        raise ValueError(
            f"{depth} bits, colour type {colours}, interlace {interlace}: only plain RGB of 8 bits is read"
        )
    channels = CHANNELS[colours]
    rows = np.frombuffer(zlib.decompress(kinds[b"IDAT"]), np.uint8).reshape(height, 1 + width * channels)
    image = _unfiltered(rows, channels).reshape(height, width, channels).astype(float)
    alpha = image[..., 3:] / 255.0 if channels == 4 else np.ones((height, width, 1))
    return image[..., :3] * alpha + WHITE * (1 - alpha)


def _chunks(png: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = 8
    while at < len(png):
        size = int.from_bytes(png[at : at + 4], "big")
        yield png[at + 4 : at + 8], png[at + 8 : at + 8 + size]
        at += 12 + size


def _unfiltered(rows: Array, channels: int) -> Array:
    """PNG's five filters undone (RFC 2083, 6)."""
    found = np.zeros((len(rows), rows.shape[1] - 1), np.uint8)
    above = np.zeros(rows.shape[1] - 1, np.uint8)
    for number, row in enumerate(rows):
        line = bytearray(row[1:].tobytes())
        up = above.tobytes()
        for at in range(len(line)):
            left, corner = (line[at - channels], up[at - channels]) if at >= channels else (0, 0)
            line[at] = (line[at] + _predicted(row[0], left, up[at], corner)) & 255
        above = np.frombuffer(bytes(line), np.uint8)
        found[number] = above
    return found


def _predicted(kind: int, left: int, up: int, corner: int) -> int:
    if kind < 4:
        return (0, left, up, (left + up) // 2)[kind]
    guess = left + up - corner
    return min((left, up, corner), key=lambda one: abs(guess - one))


def read_back(image: Array, series: Series) -> tuple[Array, float]:
    """Requests a second, 15 minutes each, and how far the sum was off before it was scaled (a share)."""
    left, right, top, bottom = _axes(image)
    inside = image[top + 1 : bottom, left + 1 : right]
    grid = top + 1 + _grid(inside)[0]
    values = series.tick * (bottom - np.arange(top + 1, bottom)) / (bottom - grid)
    blue = _covered(inside)
    minutes = (blue * values[:, None]).sum(axis=0) / np.maximum(blue.sum(axis=0), 1e-9)
    centres = (np.arange(len(minutes)) + 0.5) / len(minutes) * WEEK_S
    seconds = np.arange(0, WEEK_S, 60) + 30.0
    rates = np.interp(seconds, centres, minutes).reshape(-1, STEP_S // 60).mean(axis=1) / 60.0
    off = float(rates.sum() * STEP_S / series.requests - 1.0)
    return rates / (1.0 + off), off


def _axes(image: Array) -> tuple[int, int, int, int]:
    """Columns and rows of the frame: the outermost lines that are black nearly from end to end."""
    black = image.max(axis=2) < 60
    columns = np.flatnonzero(black.sum(axis=0) > 0.6 * image.shape[0])
    rows = np.flatnonzero(black.sum(axis=1) > 0.6 * image.shape[1])
    return int(columns[0]), int(columns[-1]), int(rows[0]), int(rows[-1])


def _grid(inside: Array) -> Array:
    """Rows of grid lines, which are grey."""
    spread = inside.max(axis=2) - inside.min(axis=2)
    grey = (spread < 12) & (inside.mean(axis=2) < 230)
    return np.flatnonzero(grey.sum(axis=1) > 0.4 * inside.shape[1])


def _covered(inside: Array) -> Array:
    """By how much the line covers each pixel, by how much less red than blue it is: white and grey have as much."""
    return np.clip((inside[..., 2] - inside[..., 0]) / (LINE[2] - LINE[0]), 0.0, 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebook", type=Path)
    code, conversation = plots(parser.parse_args().notebook)
    found = {}
    for series, image in zip(SERIES, (conversation, code), strict=True):
        found[series.name], off = read_back(image, series)
        print(f"{series.name}: sum off by {100 * off:+.1f} % before it was scaled", file=sys.stderr)
    print("start_s,conversation,code")
    for slot in range(WEEK_S // STEP_S):
        print(f"{slot * STEP_S},{found['conversation'][slot]:.3f},{found['code'][slot]:.3f}")


if __name__ == "__main__":
    main()
