"""Series that are read back from a plot."""

import json
import zlib
from base64 import b64encode
from pathlib import Path

import numpy as np
import pytest

from bench.autoscaling import azure_2024
from bench.azure_week import LINE, PLOTTED_BY, STEP_S, WEEK_S, Array, Series, pixels, plots, read_back

WIDTH, HEIGHT, TICK_ROW, TICK = 1008, 300, 40, 5000.0
"""Inside of the frame: a pixel is ten minutes, row `TICK_ROW` is the grid line of `TICK`."""


def png(image: Array) -> bytes:
    """A PNG of these pixels that uses each of the five filters."""
    height, width, channels = image.shape
    flat, body = image.reshape(height, -1).astype(int), bytearray()
    for row in range(height):
        kind = row % 5
        body.append(kind)
        for at, value in enumerate(flat[row]):
            left = flat[row, at - channels] if at >= channels else 0
            up = flat[row - 1, at] if row else 0
            corner = flat[row - 1, at - channels] if row and at >= channels else 0
            nearest = min((left, up, corner), key=lambda one: abs(left + up - corner - one))
            body.append((value - (0, left, up, (left + up) // 2, nearest)[kind]) % 256)
    head = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, {3: 2, 4: 6}[channels], 0, 0, 0])
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(bytes(body))), (b"IEND", b""))
    framed = (len(data).to_bytes(4, "big") + kind + data + bytes(4) for kind, data in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(framed)


def plotted(values: Array) -> Array:
    """A plot of a value for each column: a frame, a grid line, and a line that covers some values around each."""
    image = np.full((HEIGHT + 40, WIDTH + 60, 3), 255.0)
    left, top = 30, 10
    bottom, right = top + HEIGHT + 1, left + WIDTH + 1
    image[top + 1 + TICK_ROW, left : right + 1] = 176.0
    rows = bottom - values / TICK * (HEIGHT - TICK_ROW)
    for column, row in enumerate(rows):
        image[round(row) - 3 : round(row) + 4, left + 1 + column] = LINE
    for line in (top, bottom):
        image[line, left : right + 1] = 0.0
    image[top : bottom + 1, [left, right]] = 0.0
    return image


@pytest.mark.parametrize("channels", [3, 4])
def test_pixels_of_every_filter(channels: int) -> None:
    image = np.random.default_rng(channels).integers(0, 256, (11, 7, channels))
    image[..., 3:] = 255
    assert (pixels(png(image)) == image[..., :3]).all()


def test_what_is_seen_through_is_over_white() -> None:
    assert (pixels(png(np.zeros((2, 2, 4), int))) == 255.0).all()


def test_another_kind_of_png_is_refused() -> None:
    deep = bytearray(png(np.zeros((1, 1, 3), int)))
    deep[24] = 16
    with pytest.raises(ValueError, match="16 bits, colour type 2"):
        pixels(bytes(deep))


def test_a_series_is_read_back_and_has_as_many_requests() -> None:
    values = 2000 + 1500 * np.sin(np.arange(WIDTH) / WIDTH * 14 * np.pi)
    requests = int(values.mean() * WEEK_S / 60)
    rates, off = read_back(plotted(values), Series("drawn", "Drawn", requests, TICK))
    wanted = np.interp((np.arange(672) + 0.5) / 672, (np.arange(WIDTH) + 0.5) / WIDTH, values) / 60
    assert len(rates) == WEEK_S // STEP_S
    assert abs(off) < 0.01
    assert np.abs(rates - wanted).max() < 0.02 * wanted.max()
    assert rates.sum() * STEP_S == pytest.approx(requests)


def test_a_notebook_has_both_plots(tmp_path: Path) -> None:
    image = b64encode(png(np.zeros((1, 1, 3), int))).decode()
    outputs = [{"data": {"image/png": image}}, {"text": ["Coding"]}, {"data": {"image/png": image}}]
    imports, drawn = {"source": ["import numpy"], "outputs": []}, {"source": [PLOTTED_BY], "outputs": outputs}
    (tmp_path / "week.ipynb").write_text(json.dumps({"cells": [imports, drawn]}))
    assert len(plots(tmp_path / "week.ipynb")) == 2
    (tmp_path / "other.ipynb").write_text(json.dumps({"cells": [imports]}))
    with pytest.raises(ValueError, match="has no plots"):
        plots(tmp_path / "other.ipynb")


@pytest.mark.parametrize(("column", "requests"), [("conversation", 27_303_995), ("code", 16_803_691)])
def test_the_week_that_is_shipped_has_all_requests(column: str, requests: int) -> None:
    load = azure_2024(column, 7)
    total = sum(load.rate(at + STEP_S / 2) for at in range(0, WEEK_S, STEP_S)) * STEP_S
    assert total == pytest.approx(requests, rel=1e-3)
