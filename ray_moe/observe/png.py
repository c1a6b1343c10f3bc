"""Small pictures as PNG files with nothing but zlib: a canvas of pixels, a font of capitals, and two colour scales."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Colour = tuple[int, int, int]
WHITE, BLACK, GREY, PALE = (255, 255, 255), (20, 20, 20), (120, 120, 120), (228, 228, 228)
# Told apart also by those who see red and green alike (Okabe and Ito).
SERIES: tuple[Colour, ...] = (
    *((0, 114, 178), (213, 94, 0), (0, 158, 115), (204, 121, 167)),
    *((230, 159, 0), (86, 180, 233), (90, 90, 90)),
)
_HEAT = np.array([(255, 255, 255), (253, 212, 158), (252, 141, 89), (215, 48, 31), (103, 0, 13)], np.float64)

# 3 x 5 pixels a character, row by row, each a digit of three bits.
_GLYPHS = (
    *(75557, 26227, 71747, 71717, 55711, 74717, 74757, 71111, 75757, 75717, 25755, 65656, 34443, 65556),
    *(74647, 74644, 34553, 55755, 72227, 11152, 55655, 44447, 57755, 65555, 25552, 65644, 25563, 65655),
    *(34216, 72222, 55557, 55552, 55775, 55255, 55222, 71247, 2, 24, 2020, 700, 11244, 51245),
    *(2720, 12221, 42224, 7, 7070, 0),
)
_FONT = {c: f"{bits:05}" for c, bits in zip("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ.,:-/%+()_= ", _GLYPHS, strict=True)}
_ADVANCE = 4


class Canvas:
    """Rows of RGB pixels, the origin at the top left; what lies outside is not drawn."""

    def __init__(self, width: int, height: int) -> None:
        self.pixels: NDArray[np.uint8] = np.full((height, width, 3), 255, np.uint8)

    def fill(self, left: int, top: int, width: int, height: int, colour: Colour) -> None:
        self.pixels[max(top, 0) : max(top + height, 0), max(left, 0) : max(left + width, 0)] = colour

    def text(self, left: int, top: int, words: str, colour: Colour = BLACK, scale: int = 2) -> None:
        """In capitals; a character that the font lacks is a blank."""
        for at, character in enumerate(words.upper()):
            for row, bits in enumerate(_FONT.get(character, _FONT[" "])):
                for column in range(3):
                    if int(bits) >> (2 - column) & 1:
                        x = left + (at * _ADVANCE + column) * scale
                        self.fill(x, top + row * scale, scale, scale, colour)

    def line(self, x_N: NDArray[np.float64], y_N: NDArray[np.float64], colour: Colour, thickness: int = 2) -> None:
        """Through the points, in pixels."""
        for x0, y0, x1, y1 in zip(x_N[:-1], y_N[:-1], x_N[1:], y_N[1:], strict=True):
            steps = int(max(abs(x1 - x0), abs(y1 - y0), 1)) + 1
            xs, ys = np.linspace(x0, x1, steps).astype(int), np.linspace(y0, y1, steps).astype(int)
            for dx in range(thickness):
                for dy in range(thickness):
                    inside = (xs + dx >= 0) & (xs + dx < self.pixels.shape[1])
                    inside &= (ys + dy >= 0) & (ys + dy < self.pixels.shape[0])
                    self.pixels[ys[inside] + dy, xs[inside] + dx] = colour

    def image(self, left: int, top: int, pixels: NDArray[np.uint8]) -> None:
        height, width, _ = pixels.shape
        self.pixels[top : top + height, left : left + width] = pixels

    def to_png(self) -> bytes:
        height, width, _ = self.pixels.shape
        rows = np.zeros((height, 1 + width * 3), np.uint8)  # each row starts with its filter: none
        rows[:, 1:] = self.pixels.reshape(height, -1)
        header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
        body = zlib.compress(rows.tobytes(), 9)
        return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", body) + _chunk(b"IEND", b"")


def text_width(words: str, scale: int = 2) -> int:
    return len(words) * _ADVANCE * scale


def heat(values: NDArray[np.float64], most: float) -> NDArray[np.uint8]:
    """Colours [..., 3] of values from 0 (white) to `most` (dark red)."""
    at = np.clip(values / (most or 1.0), 0, 1) * (len(_HEAT) - 1)
    low = np.minimum(at.astype(int), len(_HEAT) - 2)
    part = (at - low)[..., None]
    return (_HEAT[low] * (1 - part) + _HEAT[low + 1] * part).round().astype(np.uint8)


def magnified(pixels: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    """Every pixel as a block of `height` x `width`."""
    return pixels.repeat(height, axis=0).repeat(width, axis=1)


def ticks(low: float, high: float, count: int = 5) -> Sequence[float]:
    """About `count` round numbers within [low, high]."""
    span = max(high - low, 1e-9)
    step = 10.0 ** np.floor(np.log10(span / count))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= count)
    return [float(tick) for tick in np.arange(np.ceil(low / step), np.floor(high / step) + 1) * step]


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
