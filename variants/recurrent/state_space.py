"""What state-space mixers share: no queries meet keys, order is in the decays, and channels pass a short convolution with SiLU.

Parameters are named as in `mamba_ssm`, so that a state_dict loads both ways.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import silu

from variants.contract import Context, Mixer, State
from variants.ops import mamba_kernels
from variants.projections import convolved


class StateSpace(Mixer):
    """Base of Mamba and Mamba-2."""

    hooks: ClassVar[tuple[str, ...]] = ()
    refused: ClassVar = {
        "rotate": "its order is in its decays",
        "relate": "it looks at no key again",
        "bias": "it never writes out the logits that a bias could be added to",
    }
    keeps_keys: ClassVar[bool] = False
    conv1d: nn.Conv1d
    implementation: str
    A_log: nn.Parameter

    def convolution(self, channels: int, width: int) -> nn.Conv1d:
        """Taps and biases of `channels` depthwise convolutions."""
        return nn.Conv1d(channels, channels, width, groups=channels)

    def convolve(
        self, x: Float[Tensor, "batch time channels"], context: Context, state: State | None, before: Int[Tensor, "batch time"] | None
    ) -> tuple[Float[Tensor, "batch time channels"], dict[str, Tensor]]:
        """(x through the convolution and SiLU, the part `taps` of the new state)."""
        weight, bias = self.conv1d.weight.squeeze(1), self.conv1d.bias
        assert bias is not None
        if self.implementation == "mamba_ssm" and state is None and context.segment_ids is None and context.split is None:
            return mamba_kernels.convolution(x, weight, bias), {}
        y, parts = convolved(x, weight, context, state, before)
        return silu(y + bias), parts

    def whole_rows(self) -> str | None:
        """Why rows cannot be split; None: they can."""
        return "impl='mamba_ssm' begins rows at 0; set impl='torch'" if self.implementation == "mamba_ssm" else None

    def empty_taps(self, batch: int, **like: Any) -> Float[Tensor, "batch taps channels"]:
        """What the convolution has before the first token."""
        return torch.zeros(batch, self.conv1d.kernel_size[0] - 1, self.conv1d.in_channels, **like)

    def taps_elements(self) -> int:
        """Numbers in `empty_taps(1)`."""
        return (self.conv1d.kernel_size[0] - 1) * self.conv1d.in_channels

    def rates(self, dtype: torch.dtype) -> Tensor:
        """A = -exp(A_log), finite, so that a step of 0 stands still whatever the rate."""
        return -self.A_log.to(dtype).exp().clamp(max=torch.finfo(dtype).max)

    def undecayed(self) -> Iterable[nn.Parameter]:
        """The rates: decayed to 0, their logarithms would make every channel forget at the same rate."""
        return [self.A_log]
