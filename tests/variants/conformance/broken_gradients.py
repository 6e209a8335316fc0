"""Mixers broken on purpose in their gradients, and in what torch does with a module: saving, casting, compiling, recomputing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from tests.variants.conformance.toys import Mean
from variants.contract import State
from variants.softmax.gqa import GroupedQuery


class Bent(torch.autograd.Function):
    """tanh, differentiated as if it were 1 - tanh rather than 1 - tanh^2."""

    @staticmethod
    def forward(ctx, x):
        y = x.tanh()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        return gradient * (1 - y)


class WrongBackward(Mean):
    """A backward pass written by hand, and wrong."""

    def weights(self, x):
        return torch.exp(Bent.apply(self.gate(x)))


class WrongBackwardOfState(Mean):
    """The same only for what the state brings."""

    def average(self, v, w, number, context, state):
        if state is not None:
            state = state.replace(total=Bent.apply(state["total"]))
        return super().average(v, w, number, context, state)


class WrongBackwardWithPadding(Mean):
    """The same only where there is padding."""

    def weights(self, x, padded=False):
        return torch.exp((Bent.apply if padded else torch.tanh)(self.gate(x)))

    def mix(self, x, context, state):
        number = self.segment_numbers(x, context, state)
        weights = self.weights(x, context.valid is not None)
        y, parts = self.average(self.values(x, number, state), weights, number, context, state)
        return self.out(y), parts, {}


class NewGradientEachTime(Mean):
    """A backward pass that draws random numbers."""

    def mix(self, x, context, state):
        y, parts, aux = super().mix(x, context, state)
        return Noised.apply(y), parts, aux


class Noised(torch.autograd.Function):
    """The identity, with noise in its gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient + torch.randn_like(gradient)


class StateDetachedOnTheWayIn(Mean):
    """Does not learn from what it remembers."""

    def average(self, v, w, number, context, state):
        return super().average(v, w, number, context, None if state is None else state.detach())


class StateDetachedOnTheWayOut(Mean):
    """Hands on numbers without their history."""

    def average(self, v, w, number, context, state):
        y, parts = super().average(v, w, number, context, state)
        return y, {name: part.detach() for name, part in parts.items()}


class StateDetachedWithPadding(Mean):
    """The same only where there is padding."""

    def average(self, v, w, number, context, state):
        y, parts = super().average(v, w, number, context, state)
        return y, parts if context.valid is None else {name: part.detach() for name, part in parts.items()}


def as_if_contiguous(x: torch.Tensor) -> torch.Tensor:
    """What a kernel reads that is given x's address and shape but not its strides."""
    flat = x.as_strided((x.untyped_storage().nbytes() // x.element_size() - x.storage_offset(),), (1,))
    return flat.repeat(-(-x.numel() // len(flat)))[: x.numel()].reshape(x.shape)


class GradientReadByAddress(Mean):
    """Its last operation reads the gradient that arrives as if it were contiguous."""

    def forward(self, x, context=None, state=None):
        output = super().forward(x, context, state)
        return output._replace(y=Passed.apply(output.y))


class Passed(torch.autograd.Function):
    """The identity, whose backward pass does not look at strides."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return as_if_contiguous(gradient)


class ExpandedGradientHalved(Mean):
    """Halves a gradient that is one number for all, such as that of a sum."""

    def forward(self, x, context=None, state=None):
        output = super().forward(x, context, state)
        return output._replace(y=Halved.apply(output.y))


class Halved(torch.autograd.Function):
    """The identity, whose backward pass has a shortcut for expanded gradients, and a wrong one."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / 2 if set(gradient.stride()) == {0} else gradient


class InputReadByAddress(Mean):
    """Reads its input as if it were contiguous."""

    def mix(self, x, context, state):
        return super().mix(x + as_if_contiguous(x.detach()), context, state)


class StateReadByAddress(Mean):
    """Reads the state as if it were contiguous."""

    def average(self, v, w, number, context, state):
        if state is not None:
            state = State(**{name: as_if_contiguous(part.detach()) + (part - part.detach()) for name, part in state.items()})
        return super().average(v, w, number, context, state)


class PaddingReadByStride(Mean):
    """Takes one row of facts for all to mean that there is nothing to say."""

    def forward(self, x, context=None, state=None):
        if context is not None and context.valid is not None and context.valid.stride(0) == 0:
            context = replace(context, valid=None)
        return super().forward(x, context, state)


class Implemented(Mean):
    """Two implementations that agree.

    Options:
        impl: which.
        kv_heads: shares nothing, but is there to be set.
    """

    implementations = ("reference", "torch")

    def __init__(
        self,
        dim: int,
        heads: int,
        position: Any = None,
        *,
        impl: Literal["auto", "reference", "torch"] = "auto",
        kv_heads: int | None = None,
        **options: Any,
    ):
        super().__init__(dim, heads, position, **options)
        self.fast, self.kv_heads = impl == "torch", kv_heads or heads

    def mix(self, x, context, state):
        y, parts, aux = super().mix(x, context, state)
        return (self.spoil(y, state) if self.fast else y), parts, aux

    def spoil(self, y, state):
        """What the fast one does otherwise."""
        return y


class DisagreeInTheBackwardPass(Implemented):
    """The fast one has the right outputs."""

    def spoil(self, y, state):
        return 2 * y - y.detach()


class DisagreeInBf16(Implemented):
    """The fast one is right in fp32 and under autocast."""

    def spoil(self, y, state):
        return 1.2 * y if self.out.weight.dtype == torch.bfloat16 else y


class DisagreeUnderAutocast(Implemented):
    """The fast one is right in fp32 and in bf16."""

    def spoil(self, y, state):
        return 1.2 * y if torch.is_autocast_enabled("cpu") else y


class DisagreeWithState(Implemented):
    """The fast one is right in a full pass."""

    def spoil(self, y, state):
        return y if state is None else 1.001 * y


class DisagreeWhenGrouped(Implemented):
    """The fast one is right where every head has keys and values of its own."""

    def spoil(self, y, state):
        return y if self.kv_heads == self.heads else 1.001 * y


class GroupsTiled(GroupedQuery):
    """Query head h reads key/value head h % kv_heads in one implementation, and h // (heads / kv_heads) in the others."""

    @property
    def attention(self):
        whole = super().attention
        if self.implementation != "torch":
            return whole
        return lambda q, k, v, **told: whole(q, *(x.repeat(1, q.shape[1] // k.shape[1], 1, 1) for x in (k, v)), **told)


class TableNotSaved(Mean):
    """A random table that the state_dict leaves out."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.register_buffer("table", torch.randn(self.dim), persistent=False)

    def weights(self, x):
        return super().weights(x * self.table)


class ParameterNotSaved(Mean):
    """A state_dict without one parameter."""

    def state_dict(self, *args: Any, **options: Any):
        return {name: part for name, part in super().state_dict(*args, **options).items() if name != "gate.bias"}


class ParameterNotLoaded(Mean):
    """Keeps a parameter, which only a loss shows, as it was."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.balance = nn.Parameter(torch.randn(2))

    def load_state_dict(self, state_dict, *args: Any, **options: Any):
        return super().load_state_dict(dict(state_dict) | {"balance": self.balance.detach()}, *args, **options)


class TableRounded(Mean):
    """A table that a cast of the model rounds for good."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.register_buffer("table", torch.arange(1, self.dim + 1).double().rsqrt(), persistent=False)

    def weights(self, x):
        return super().weights(x * self.table.to(x.dtype))


class TooFineForBf16(Mean):
    """Lives on digits of its parameters that bf16 does not have."""

    def weights(self, x):
        return torch.exp(torch.sin(1000 * self.gate(x)))


class SumsInHalf(Mean):
    """Running sums of ten bits."""

    def init_parts(self, batch, **like):
        return super().init_parts(batch, **like | {"dtype": torch.float16})


class SumsRoundedBetweenCalls(Mean):
    """Begins in fp32, hands on the dtype of the input."""

    def init_parts(self, batch, **like):
        return super().init_parts(batch, **like | {"dtype": torch.promote_types(like["dtype"], torch.float32)})

    def average(self, v, w, number, context, state):
        y, parts = super().average(v, w, number, context, state)
        return y.to(v.dtype), {name: part.to(v.dtype) for name, part in parts.items()}


class SumsRoundedUnderAutocast(Mean):
    """Hands on what a product under autocast gave."""

    def average(self, v, w, number, context, state):
        y, parts = super().average(v, w, number, context, state)
        return y, {name: part.bfloat16() if torch.is_autocast_enabled("cpu") else part for name, part in parts.items()}


class CompiledOtherwise(Mean):
    """A branch for the compiler that somebody forgot to keep up to date."""

    def weights(self, x):
        return super().weights(x if not torch.compiler.is_compiling() else x / 2)


class CompiledOtherwiseInSteps(Mean):
    """The same where there is a state."""

    def average(self, v, w, number, context, state):
        y, parts = super().average(v, w, number, context, state)
        return (y * 2 if torch.compiler.is_compiling() and state is not None else y), parts


class CompiledToAnotherGradient(Mean):
    """The same in the gradient alone."""

    def values(self, x, number, state):
        v = super().values(x, number, state)
        return 2 * v - v.detach() if torch.compiler.is_compiling() else v


class CallsCounted(Mean):
    """Every other call weighs otherwise: what is recomputed is not what was computed."""

    calls = 0

    def weights(self, x):
        self.calls += 1
        return super().weights(x) ** (1 + self.calls % 2)


class OwnRandomNumbers(Mean):
    """Drops out by a generator that nobody else knows of."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.generator = torch.Generator().manual_seed(0)

    def values(self, x, number, state):
        v = super().values(x, number, state)
        return v * (torch.rand(v.shape, generator=self.generator) > 0.5) if self.training else v


class UndecayedElsewhere(Mean):
    """Protects a parameter that is not its own."""

    elsewhere = nn.Parameter(torch.zeros(3, 5))

    def undecayed(self):
        return [self.gate.weight, self.elsewhere]


class UndecayedTwice(Mean):
    """Protects one parameter twice."""

    def undecayed(self):
        return [self.gate.weight, self.out.weight, self.gate.weight]


class UndecayedOnce(Mean):
    """Says so only to the first who asks."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.protected = [self.gate.weight]

    def undecayed(self):
        while self.protected:
            yield self.protected.pop()


class UndecayedBeforeTheCopy(Mean):
    """Remembers its parameters in a closure, which a copy keeps."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.protected = lambda: [self.gate.weight]

    def undecayed(self):
        return self.protected()
