"""Rotary positions stretched to sequences longer than those trained on: each scheme is a rule for the frequencies.

    f_i = base^(-2i / width)        s = factor = target length / trained length        r_i = trained length * f_i / 2 pi   turns in training

    pi              f_i / s
    ntk             base -> base * s^(width / (width - 2))
    dynamic_ntk     the same with s l / L - (s - 1) in place of s, for a sequence of l > L tokens
    ntk_by_parts    fast pairs stay, slow ones as pi, a ramp in r_i between
    yarn            the same with a ramp in i, and logits * (0.1 ln s + 1)^2
    llama3          the same with a ramp in r_i from 1 to 4

Chen et al. 2023, "Extending Context Window of Large Language Models via Positional Interpolation"; bloc97 and emozilla 2023 (NTK-aware and
dynamic scaling, published as code); Peng et al. 2023, "YaRN: Efficient Context Window Extension of Large Language Models", sections 3.1 to
3.4; Grattafiori et al. 2024, "The Llama 3 Herd of Models".

Frequencies are pure functions of the options and of a row's own length, in fp64. At factor 1 every one of them is `rope`,
bit for bit; dynamic_ntk up to the trained length.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from registry import positions
from variants.positions.rotary import Rotary, frequencies

Lengths = Int[Tensor, " rows"] | None
Device = torch.device | str | None
Pairs = Float[Tensor, "*rows pairs"]


class Stretched(Rotary):
    """Base of the schemes that stretch.

    Options:
        factor: how much longer the target is than what the model was trained on.
    """

    def __init__(self, head_dim: int, heads: int, dim: int, *, factor: float = 4.0, **options: Any):
        super().__init__(head_dim, heads, dim, **options)
        if not 1 <= factor < math.inf:
            raise ValueError(f"{type(self).__name__}: factor stretches and must be at least 1; got {factor}")
        self.factor = factor


class Measured(Stretched):
    """Base of those that look at how far a pair turned in training.

    Options:
        trained_length: tokens in the sequences that the model was trained on.
    """

    def __init__(self, head_dim: int, heads: int, dim: int, *, trained_length: int = 2048, **options: Any):
        super().__init__(head_dim, heads, dim, **options)
        if trained_length < 2:
            raise ValueError(f"{type(self).__name__}: trained_length must be at least 2; got {trained_length}")
        self.trained_length = trained_length

    def mixed(self, fast: Pairs) -> Pairs:
        """f_i where `fast` is 1, f_i / factor where it is 0."""
        found = frequencies(self.width, self.base, fast.device)
        # At factor 1 both are one number, and must come out as it.
        return found * fast + (found / self.factor) * (1 - fast) if self.factor != 1 else found

    def turns(self, device: Device = None) -> Pairs:
        """r_i, how often each pair turned in the trained length."""
        return self.trained_length * frequencies(self.width, self.base, device) / (2 * math.pi)


@positions.register("pi", hooks=("rotate",))
class Interpolation(Stretched):
    """Position interpolation (PI): all pairs turn more slowly, as if positions were divided by the factor."""

    def frequencies(self, lengths: Lengths = None, device: Device = None) -> Pairs:
        """f_i / factor."""
        return super().frequencies(lengths, device) / self.factor


@positions.register("ntk", hooks=("rotate",))
class NTK(Stretched):
    """NTK-aware scaling: a larger base, so that the fastest pair stays and the slowest is interpolated.

    Options:
        form: `base` as above; `fixed` slows the fastest pair as well, f_i s^(-2(i+1)/width); `mixed` slows by exp(-a (i+1)^0.625).
    """

    def __init__(self, head_dim: int, heads: int, dim: int, *, form: Literal["base", "fixed", "mixed"] = "base", **options: Any):
        super().__init__(head_dim, heads, dim, **options)
        require_two_pairs(self)
        self.form = form

    def frequencies(self, lengths: Lengths = None, device: Device = None) -> Pairs:
        """By one of the three forms; the slowest pair comes out as f / factor in each."""
        found, pairs = super().frequencies(lengths, device), self.width // 2
        number = torch.arange(1, pairs + 1, dtype=torch.float64, device=device)
        if self.form == "base":
            return ntk(self.width, self.base, torch.tensor(self.factor, dtype=torch.float64, device=device))
        if self.form == "fixed":
            return found * self.factor ** (-number / pairs)
        return found * torch.exp(-math.log(self.factor) * (number / pairs) ** 0.625)


@positions.register("dynamic_ntk", hooks=("rotate",), length_dependent=True)
class DynamicNTK(Measured):
    """NTK-aware scaling that follows each row's own length: none up to the trained one, then more and more.

    Options:
        factor: 1 for a base that grows with l / L; the growth is steeper by the factor otherwise.
    """

    def __init__(self, head_dim: int, heads: int, dim: int, *, factor: float = 1.0, **options: Any):
        super().__init__(head_dim, heads, dim, factor=factor, **options)
        require_two_pairs(self)

    def frequencies(self, lengths: Lengths = None, device: Device = None) -> Pairs:
        """Of rows of these lengths; without any, those of the trained length."""
        if lengths is None:
            return frequencies(self.width, self.base, device)
        # A shorter row is not compressed: below L the expression may even be negative.
        longer = lengths.to(torch.float64).clamp(min=self.trained_length) / self.trained_length
        return ntk(self.width, self.base, self.factor * longer - (self.factor - 1))


@positions.register("ntk_by_parts", hooks=("rotate",))
class NTKByParts(Measured):
    """NTK by parts: pairs that turned often stay, those that never turned once are interpolated, in between a ramp in turns.

    Options:
        slow: at this many turns in training, or fewer, a pair is interpolated.
        fast: at this many turns, or more, it stays as it is.
    """

    def __init__(self, head_dim: int, heads: int, dim: int, *, slow: float = 1.0, fast: float = 32.0, **options: Any):
        super().__init__(head_dim, heads, dim, **options)
        require_order(self, "slow", slow, "fast", fast)
        self.slow, self.fast = slow, fast

    def frequencies(self, lengths: Lengths = None, device: Device = None) -> Pairs:
        """Between f_i and f_i / factor by the share of the ramp."""
        return self.mixed(((self.turns(device) - self.slow) / (self.fast - self.slow)).clamp(0, 1))


@positions.register("llama3", hooks=("rotate",))
class Llama3(Measured):
    """The stretching of Llama 3.1: by parts, with a ramp between one and four turns in training.

    Options:
        factor: how much longer the target is than what the model was trained on.
        trained_length: tokens in the sequences that the model was trained on.
        low_freq_factor: at this many turns in training, or fewer, a pair is interpolated.
        high_freq_factor: at this many turns, or more, it stays as it is.
    """

    def __init__(
        self,
        head_dim: int,
        heads: int,
        dim: int,
        *,
        factor: float = 8.0,
        trained_length: int = 8192,
        low_freq_factor: float = 1.0,
        high_freq_factor: float = 4.0,
        **options: Any,
    ):
        super().__init__(head_dim, heads, dim, factor=factor, trained_length=trained_length, **options)
        require_order(self, "low_freq_factor", low_freq_factor, "high_freq_factor", high_freq_factor)
        self.low, self.high = low_freq_factor, high_freq_factor

    def frequencies(self, lengths: Lengths = None, device: Device = None) -> Pairs:
        """Between f_i and f_i / factor by the share of the ramp."""
        return self.mixed(((self.turns(device) - self.low) / (self.high - self.low)).clamp(0, 1))


@positions.register("yarn", hooks=("rotate",))
class YaRN(Measured):
    """YaRN: by parts, and the logits sharpened to make up for the longer row.

    The paper's ramp is linear in turns, its code's in the number of the pair; public models follow the code.

    Options:
        beta_fast: at this many turns in training, or more, a pair stays as it is.
        beta_slow: at this many turns, or fewer, it is interpolated.
        ramp: linear in the number of the pair (`pairs`) or in its turns (`rotations`).
        truncate: round the ends of a ramp in pairs outwards to whole pairs.
        attention_factor: what cosines and sines are multiplied by, final as it is given (default: 0.1 ln(factor) + 1).
        temperature_on: apply it to what is turned, as the paper does, or its square to all `logits`; the same where all channels turn.
    """

    def __init__(
        self,
        head_dim: int,
        heads: int,
        dim: int,
        *,
        beta_fast: float = 32.0,
        beta_slow: float = 1.0,
        ramp: Literal["pairs", "rotations"] = "pairs",
        truncate: bool = True,
        attention_factor: float | None = None,
        temperature_on: Literal["rotation", "logits"] = "rotation",
        **options: Any,
    ):
        super().__init__(head_dim, heads, dim, **options)
        require_order(self, "beta_slow", beta_slow, "beta_fast", beta_fast)
        if self.base <= 1:
            raise ValueError(f"YaRN: base must lie above 1, so that later pairs are slower; got {self.base}")
        if attention_factor is not None and attention_factor <= 0:
            raise ValueError(f"YaRN: attention_factor must be positive; got {attention_factor}")
        self.beta_fast, self.beta_slow, self.ramp, self.truncate = beta_fast, beta_slow, ramp, truncate
        self.attention_factor = 0.1 * math.log(self.factor) + 1 if attention_factor is None else attention_factor
        apply_temperature(self, self.attention_factor, temperature_on)

    def frequencies(self, lengths: Lengths = None, device: Device = None) -> Pairs:
        """Between f_i and f_i / factor by the share of the ramp."""
        if self.ramp == "rotations":
            return self.mixed(((self.turns(device) - self.beta_slow) / (self.beta_fast - self.beta_slow)).clamp(0, 1))
        low, high = self.ends()
        number = torch.arange(self.width // 2, dtype=torch.float64, device=device)
        return self.mixed(1 - ((number - low) / (high - low)).clamp(0, 1))

    def ends(self) -> tuple[float, float]:
        """The pair up to which all stay, and the one from which all are interpolated; width - 1 and not the last pair bounds them."""
        low, high = (
            self.width * math.log(self.trained_length / (2 * math.pi * turns)) / (2 * math.log(self.base))
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = float(math.floor(low)), float(math.ceil(high))
        low, high = max(low, 0.0), min(high, self.width - 1.0)
        # Where no pair turns so slowly, or none so fast, as to be on the ramp, the bounds leave its ends equal or exchanged.
        return low, max(high, low + 0.001)


def ntk(width: int, base: float, factor: Float[Tensor, "*rows"]) -> Pairs:
    """Frequencies of the base that slows the last pair by `factor`, one row for each."""
    exponents = torch.arange(0, width, 2, dtype=torch.float64, device=factor.device) / width
    grown = base * factor ** (width / (width - 2))
    return grown.unsqueeze(-1) ** -exponents


def apply_temperature(scheme: Rotary, factor: float, where: str) -> None:
    """Make cosines and sines, or the logits by its square, larger by `factor`."""
    if where == "rotation":
        scheme.magnitude = factor
    else:
        scheme.logit_scale = factor**2


def require_two_pairs(scheme: Rotary) -> None:
    """Raises ValueError where there is no second pair, whose speed the new base is to set."""
    if scheme.width < 4:
        raise ValueError(
            f"{type(scheme).__name__}: the fastest pair keeps its speed, so that there must be another; got width {scheme.width}"
        )


def require_order(scheme: Rotary, low_name: str, low: float, high_name: str, high: float) -> None:
    """Raises ValueError unless 0 < low < high."""
    if not 0 < low < high:
        raise ValueError(f"{type(scheme).__name__}: {low_name} must lie above 0 and below {high_name}; got {low} and {high}")
