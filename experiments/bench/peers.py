"""The public implementations that ours are compared with: the one place of the bench that imports them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
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


def mambapy_scan() -> Callable[..., Tensor]:
    """mambapy's selective scan by its parallel `pscan`, on x, step, rate, write and read in our layout. Raises Missing."""
    pscan = package("mambapy.pscan", "mambapy").pscan

    def call(x: Tensor, step: Tensor, rate: Tensor, write: Tensor, read: Tensor) -> Tensor:
        states = pscan((step.unsqueeze(-1) * rate).exp(), (step * x).unsqueeze(-1) * write.unsqueeze(2))
        y: Tensor = (states @ read.unsqueeze(-1)).squeeze(-1)
        return y

    return call


def mambapy_mamba(mixer: Any) -> nn.Module:
    """mambapy's block of the sizes of our `mamba`, with the same names of parameters. Raises Missing."""
    mamba = package("mambapy.mamba", "mambapy")
    sizes = {"d_state": mixer.state_dim, "d_conv": mixer.conv1d.kernel_size[0], "expand_factor": mixer.width // mixer.dim}
    block: nn.Module = mamba.MambaBlock(mamba.MambaConfig(d_model=mixer.dim, n_layers=1, dt_rank=mixer.dt_proj.in_features, **sizes))
    return block


def transformers_mamba(mixer: Any) -> nn.Module:
    """The slow path of transformers' Mamba, likewise. Raises Missing."""
    mamba = package("transformers.models.mamba.modeling_mamba", "transformers")
    sizes = {"state_size": mixer.state_dim, "conv_kernel": mixer.conv1d.kernel_size[0], "expand": mixer.width // mixer.dim}
    config = mamba.MambaConfig(hidden_size=mixer.dim, time_step_rank=mixer.dt_proj.in_features, **sizes)
    block: nn.Module = mamba.MambaMixer(config, 0)
    return block


def transformers_mamba2(mixer: Any) -> nn.Module:
    """The torch path of transformers' Mamba-2, likewise. Raises Missing."""
    mamba2 = package("transformers.models.mamba2.modeling_mamba2", "transformers")
    sizes = {"num_heads": mixer.heads, "head_dim": mixer.head_dim, "state_size": mixer.state_dim, "n_groups": mixer.groups}
    expand = mixer.heads * mixer.head_dim // mixer.dim
    # Its chunks are as long as it has them by default.
    config = mamba2.Mamba2Config(hidden_size=mixer.dim, expand=expand, conv_kernel=mixer.conv1d.kernel_size[0], **sizes)
    block: nn.Module = mamba2.Mamba2Mixer(config, layer_idx=0)
    return block


def lucidrains_nsa(mixer: Any) -> nn.Module:
    """lucidrains' native sparse attention with blocks as in ours; its window has a token more, its branches share keys. Raises Missing."""
    layer: nn.Module = package("native_sparse_attention_pytorch", "native-sparse-attention-pytorch").SparseAttention(
        dim=mixer.dim,
        dim_head=mixer.head_dim,
        heads=mixer.heads,
        kv_heads=mixer.kv_heads,
        sliding_window_size=mixer.window,
        compress_block_size=mixer.summaries.block,
        compress_block_sliding_stride=mixer.summaries.stride,
        selection_block_size=mixer.block,
        num_selected_blocks=mixer.count,
        causal=True,
    )
    return layer


#: Public layers of a variant: variant -> {whose: (what makes one of the same sizes, whether it takes the parameters of ours)}.
LAYERS: dict[str, dict[str, tuple[Callable[[Any], nn.Module], bool]]] = {
    "mamba": {"mambapy": (mambapy_mamba, True), "transformers": (transformers_mamba, True)},
    "mamba2": {"transformers": (transformers_mamba2, True)},
    "nsa": {"lucidrains": (lucidrains_nsa, False)},
}
