"""Ring attention: full attention of rows that are split over processes, here all in one.

    o_i = sum_r exp(lse_ir - lse_i) o_ir        o_ir: attention of query i to the keys of slice r of its row

Liu et al. 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context". Exact: outputs and gradients are those of `full`,
and so are parameters, costs and cache. To split rows over processes is a property of a run, `trainer.context_parallel`, for this variant as
for others; alone it takes the ranks one after another, so that the algorithm can be checked and timed where there is one process.
"""

from __future__ import annotations

from typing import Any, ClassVar

from jaxtyping import Float
from torch import Tensor

from registry import variants
from variants.cache import Slots
from variants.context import split_rows
from variants.contract import Context, NotApplicable, State
from variants.ops.ranks import Simulated
from variants.softmax.layer import Softmax


@variants.register(
    "ring", time="T^2", state="T", hooks=("rotate", "bias"), keeps_keys=False, implementations=("sdpa", "torch", "reference")
)
class RingAttention(Softmax):
    """Full attention in slices of a row that lie with several ranks, whose keys and values go round.

    Pieces of a row behind a cache are attended to by `impl`, without a ring.

    Options:
        ranks: how many processes are imitated, each with an early and a late slice of a row; there are fewer where a slice had no token.
    """

    hooks = ("rotate", "bias")
    refused: ClassVar = {"relate": "keys go round turned, and a map of distances turns them by where the query is"}
    keeps_keys: ClassVar[bool] = False

    def __init__(self, dim: int, heads: int, position: Any = None, *, ranks: int = 4, **options: Any):
        self.at_least_one(ranks=ranks)
        super().__init__(dim, heads, position, **options)
        self.ranks, reason = ranks, self.whole_rows()
        if reason is not None:
            raise NotApplicable(f"RingAttention: {reason}")

    def mix(
        self, x: Float[Tensor, "batch time dim"], context: Context, state: State | None
    ) -> tuple[Float[Tensor, "batch time dim"], dict[str, Tensor | Slots], dict[str, Tensor]]:
        """A full pass slice by slice, and back into the order of the row."""
        ranks = min(self.ranks, x.shape[1] // 2)
        if state is not None or context.split is not None or ranks < 2:
            return super().mix(x, context, state)
        part, told = split_rows(x, context, Simulated(ranks))
        assert told.split is not None
        y, _, aux = super().mix(part, told, None)
        return told.split.ring.whole(y), {}, aux
