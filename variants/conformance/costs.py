"""What a call costs, counted at torch's dispatcher, and how a cost grows with the length."""

from __future__ import annotations

import math
import re
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten


class Meter(TorchDispatchMode):
    """Counts every operation that runs inside, those of a backward pass included.

    products: floating-point operations of matrix products, 2 a multiply-add, by torch's own formulas.
    projections: those of them that have one of `parameters` as a factor.
    written: numbers written by all other operations; for a reduction, the numbers it reads.
    peak: the most bytes alive at once in storages made inside.

    Exact for what passes the dispatcher. The buffers of a fused kernel do not, nor does work outside torch.
    """

    def __init__(self, parameters: Iterable[Tensor] = ()):
        super().__init__()
        self.products = self.projections = self.written = self.peak = 0
        self._parameters = {parameter.untyped_storage()._cdata for parameter in parameters}
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        storages = {tensor.untyped_storage()._cdata for tensor in given}
        # What lies in storage that was given is a view, unless the operation writes in place.
        new = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in storages]
        for tensor in new:
            self._follow(tensor.untyped_storage())
        formula = FORMULAS.get(func._overloadpacket) or flop_registry.get(func._overloadpacket)  # operators may say theirs later
        if formula is not None:
            operations = formula(*args, **kwargs, out_val=out)
            self.products += operations
            self.projections += operations * bool(storages & self._parameters)
            return out
        in_place = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)] if func._schema.is_mutable else []
        read = given if torch.Tag.reduction in func.tags else []
        self.written += max(sum(tensor.numel() for tensor in tensors) for tensors in (new, in_place, read))
        return out

    @property
    def operations(self) -> int:
        """Everything counted, two operations for a number written: what is written is seldom one multiplication alone."""
        return self.products + 2 * self.written

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._alive:
            return
        # The object lives as long as the storage itself, graphs of saved tensors included.
        self._alive[key] = (weakref.ref(storage, lambda _: self._forget(key)), storage.nbytes())
        self._bytes += storage.nbytes()
        self.peak = max(self.peak, self._bytes)

    def _forget(self, key: int) -> None:
        self._bytes -= self._alive.pop(key)[1]


class Growth(NamedTuple):
    """cost ~ length^exponent by least squares on logarithms; `fit` is the share of the variance that this explains."""

    exponent: float
    fit: float

    def __str__(self) -> str:
        return f"{power(self.exponent)} (R^2 {self.fit:.3f})"


def growth(lengths: Sequence[int], costs: Sequence[int | float]) -> Growth:
    """How a positive cost grows over the lengths."""
    x, y = np.log(np.asarray(lengths, float)), np.log(np.asarray(costs, float))
    slope, offset = np.polyfit(x, y, 1)
    spread = float(((y - y.mean()) ** 2).sum())
    left = float(((y - offset - slope * x) ** 2).sum())
    return Growth(float(slope), 1.0 - left / spread if spread > 1e-12 else 1.0)


def power(exponent: float) -> str:
    """T^1.00, and never T^-0.00."""
    return f"T^{round(exponent, 2) + 0.0:.2f}"


def complexity(text: str) -> Callable[[int], float]:
    """The function of T behind a product such as "T", "T^2", "T log T", "T W" or "1". What is not T is a constant. Raises ValueError."""
    factors = []
    for factor in re.findall(r"log T|\S+", text):
        power = re.fullmatch(r"T(?:\^(\d+(?:\.\d+)?))?", factor)
        if power is None and not re.fullmatch(r"log T|1|[A-SU-Za-z]\w?(?:\^\d+)?", factor):
            raise ValueError(f"{text!r} is not a product of powers of T, log T and constants")
        factors.append((float(power[1] or 1), 0) if power else (0.0, int(factor == "log T")))
    if not factors:
        raise ValueError("it is empty")
    exponent, logs = (sum(column) for column in zip(*factors, strict=True))
    return lambda time: float(time) ** exponent * math.log(time) ** logs


def _pairs(q: Tensor, k: Tensor, causal: bool) -> int:
    """Pairs of query and key in sight, over batch and heads; torch's causal mask is anchored top left."""
    rows, q_time, k_time = math.prod(q.shape[:-2]), q.shape[-2], k.shape[-2]
    return rows * (sum(min(i + 1, k_time) for i in range(q_time)) if causal else q_time * k_time)


def _attention(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, causal: bool = False, **_: Any) -> int:
    return 2 * _pairs(q, k, causal) * (q.shape[-1] + v.shape[-1])


def _attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, dropout: float, causal: bool, **_: Any
) -> int:
    # The scores again, and the gradients of q and k from theirs; those of the weights and of v.
    return 2 * _pairs(q, k, causal) * (3 * q.shape[-1] + 2 * v.shape[-1])


def _vector(matrix: Tensor, vector: Tensor, **_: Any) -> int:
    return 2 * matrix.numel()


#: Operations of one call: torch's formulas, which lack products in place or with a vector, and the fused kernel of the CPU.
FORMULAS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    aten.addmm_: flop_registry[aten.addmm],
    aten.baddbmm_: flop_registry[aten.baddbmm],
    aten.mv: _vector,
    aten.dot: _vector,
    aten.addmv: lambda _, matrix, vector, **__: _vector(matrix, vector),
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
