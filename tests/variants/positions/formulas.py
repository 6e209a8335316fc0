"""The tables and numbers of the position schemes, in Python's own floats: what the schemes are compared with."""

from __future__ import annotations

import math


def rope(width: int, base: float) -> list[float]:
    return [1 / base ** (2 * i / width) for i in range(width // 2)]


def pi(width: int, base: float, factor: float) -> list[float]:
    return [f / factor for f in rope(width, base)]


def ntk(width: int, base: float, factor: float, form: str = "base") -> list[float]:
    pairs = width // 2
    if form == "base":
        return rope(width, base * factor ** (width / (width - 2)))
    if form == "fixed":
        return [f / factor ** (2 * (i + 1) / width) for i, f in enumerate(rope(width, base))]
    slowing = math.log(factor) / pairs**0.625
    return [f * math.exp(-slowing * (i + 1) ** 0.625) for i, f in enumerate(rope(width, base))]


def dynamic_ntk(width: int, base: float, factor: float, trained_length: int, length: int) -> list[float]:
    if length <= trained_length:
        return rope(width, base)
    return ntk(width, base, factor * length / trained_length - factor + 1)


def by_parts(width: int, base: float, factor: float, trained_length: int, slow: float, fast: float) -> list[float]:
    """By wavelengths: one that fits `fast` times into the trained length stays, one that fits `slow` times or less is stretched."""
    found = []
    for f in rope(width, base):
        wavelength = 2 * math.pi / f
        if wavelength <= trained_length / fast:
            found.append(f)
        elif wavelength >= trained_length / slow:
            found.append(f / factor)
        else:
            share = (trained_length / wavelength - slow) / (fast - slow)
            found.append(share * f + (1 - share) * f / factor)
    return found


def yarn_ends(width: int, base: float, trained_length: int, fast: float = 32.0, slow: float = 1.0) -> tuple[float, float]:
    """The pairs, as real numbers, that turn `fast` and `slow` times in the trained length."""

    def pair_that_turns(times: float) -> float:
        return width / 2 * math.log(trained_length / (2 * math.pi * times), base)

    return pair_that_turns(fast), pair_that_turns(slow)


def yarn(
    width: int, base: float, factor: float, trained_length: int, fast: float = 32.0, slow: float = 1.0, truncate: bool = True
) -> list[float]:
    low, high = yarn_ends(width, base, trained_length, fast, slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    found = []
    for i, f in enumerate(rope(width, base)):
        share = 0.0 if i <= low else 1.0 if i >= high else (i - low) / (high - low)
        found.append((1 - share) * f + share * f / factor)
    return found


def longrope(width: int, base: float, factors: list[float]) -> list[float]:
    return [f / slower for f, slower in zip(rope(width, base), factors, strict=True)]


def alibi_slopes(heads: int) -> list[float]:
    power = 2 ** math.floor(math.log2(heads))
    first = [2 ** (-8 * (h + 1) / power) for h in range(power)]
    between = [2 ** (-8 * (h + 1) / (2 * power)) for h in range(0, 2 * power, 2)]
    return (first + between)[:heads]


def t5_bucket(ahead: int, buckets: int = 32, max_distance: int = 128, bidirectional: bool = False) -> int:
    offset = 0
    if bidirectional:
        buckets //= 2
        offset = buckets if ahead > 0 else 0
    distance, exact = abs(ahead), buckets // 2
    if distance < exact:
        return offset + distance
    # The logarithms compared as powers of whole numbers, which round nothing.
    steps = buckets - exact
    passed = [step for step in range(steps) if distance**steps * exact**step >= max_distance**step * exact**steps]
    return offset + exact + passed[-1]


def sinusoid(position: int, dim: int, base: float = 10000.0) -> list[float]:
    """Interleaved: a sine for every even channel, a cosine for every odd one."""
    return [(math.cos if channel % 2 else math.sin)(position / base ** ((channel - channel % 2) / dim)) for channel in range(dim)]


def self_extend(at_query: int, at_key: int, group: int, window: int) -> int:
    if at_query - at_key < window:
        return at_query - at_key
    return at_query // group - at_key // group + window - window // group


def rerope(at_query: int, at_key: int, window: int, slowdown: float | None = None) -> float:
    distance = at_query - at_key
    if distance < window or slowdown is None:
        return min(distance, window)
    return window + (distance - window) / slowdown


def dual_chunk(at_query: int, at_key: int, chunk: int, local: int) -> int:
    block = chunk - local
    blocks_between = at_query // block - at_key // block
    if blocks_between == 0:
        return at_query - at_key
    if blocks_between == 1:
        return min(at_query % block + block, chunk) - at_key % block
    return chunk - at_key % block
