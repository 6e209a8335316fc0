"""The public implementations that ours are compared with: the one place of the bench that imports them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention


class Missing(Exception):
    """A peer that cannot be had here; the message says why."""


def package(module: str, distribution: str) -> Any:
    """The module of an optional package. Raises Missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name == module:
            raise Missing(f"not installed: pip install {distribution}") from error
        raise Missing(f"unavailable: {error}") from error
    except Exception as error:  # another binary interface, a missing driver: no reason to time nothing else
        raise Missing(f"unavailable: {error}") from error


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention by the kernel that torch picks."""
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def sdpa_math(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention by torch's own composition of products and softmax."""
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(q, k, v, is_causal=True)


def local_attention(window: int) -> Callable[..., Tensor]:
    """lucidrains' local-attention, in blocks of `window`. Exact, it has window + 1 tokens in sight: its distance is at most `window`.

    Raises Missing.
    """
    layer: Callable[..., Tensor] = package("local_attention", "local-attention").LocalAttention(
        window_size=window, causal=True, look_backward=1, exact_windowsize=True, use_rotary_pos_emb=False, autopad=True
    )
    return layer


def transformers_delta(model: str, function: str) -> Callable[..., Tensor]:
    """The chunked torch path of a delta rule in transformers, on q, k, v, beta and log-decays in our layout. It scales q itself.

    Raises Missing.
    """
    path = getattr(package(f"transformers.models.{model}.modeling_{model}", "transformers"), function)
    path = getattr(path, "__wrapped__", path)  # without what would look for a kernel first

    def call(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor) -> Tensor:
        q, k, v, beta, log_decay = (x.transpose(1, 2) for x in (q * q.shape[-1] ** 0.5, k, v, beta, log_decay))
        o: Tensor = path(q, k, v, log_decay, beta, initial_state=None, output_final_state=False)[0]
        return o.transpose(1, 2)

    return call
