"""Rows taken apart where segments begin, so that blocks are counted from the first token of each.

A packed row is several sequences, and a cache may hold another number of tokens for each row. Mixers that cut a sequence into blocks see
them as pieces: one a segment, its slots from the first token of the segment on, its queries those of this call. Where every row is one
piece that begins at the first slot, nothing is moved.
"""

from __future__ import annotations

import torch
from jaxtyping import Int, Shaped
from torch import Tensor


class Pieces:
    """The pieces of rows whose token t has before[:, t] tokens of its segment before it; `cached` slots lie before the new ones.

    place0: how many tokens each piece had before this call. count: how many valid ones it got. last: of each row, its last piece.
    """

    def __init__(self, before: Int[Tensor, "batch time"], cached: int, lengths: Int[Tensor, " batch"]):
        batch, time = before.shape
        self.cached, self.time = cached, time
        opens = (before == 0) & (torch.arange(time, device=before.device) < lengths[:, None])
        opens[:, 0] = True
        self.row, self.begin = opens.nonzero(as_tuple=True)
        self.place0 = before[self.row, self.begin]
        follows = torch.cat([self.row[1:] == self.row[:-1], self.row.new_zeros(1, dtype=torch.bool)])
        end = torch.where(follows, self.begin.roll(-1), lengths[self.row])
        self.count = (end - self.begin).clamp(min=0)
        self.last = (torch.cat([self.row[1:], self.row.new_tensor([batch])]) != self.row).nonzero().squeeze(1)
        #: Whether each row is one piece, in its place.
        self.trivial = len(self.row) == batch and bool((self.place0 == cached).all())

    def __len__(self) -> int:
        return len(self.row)

    @property
    def queries_time(self) -> int:
        """Queries of the longest piece; all pieces are as long."""
        return self.time if self.trivial else int(self.count.max().clamp(min=1))

    @property
    def place(self) -> Int[Tensor, "pieces q_time"]:
        """The slot of its piece that each query stands at."""
        return self.place0[:, None] + torch.arange(self.queries_time, device=self.row.device)

    def queries(self, x: Shaped[Tensor, "batch heads time width"]) -> Shaped[Tensor, "pieces heads q_time width"]:
        """The new tokens of each piece, from its first one on; what lies behind its last is arbitrary."""
        if self.trivial:
            return x
        index = (self.begin[:, None] + torch.arange(self.queries_time, device=x.device)).clamp(max=self.time - 1)
        return x.transpose(1, 2)[self.row[:, None], index].transpose(1, 2)

    def slots(self, x: Shaped[Tensor, "batch heads slots width"]) -> Shaped[Tensor, "pieces heads k_time width"]:
        """The slots of each piece, cached and new, from the first of its segment on."""
        if self.trivial:
            return x
        longest = int((self.place0 + self.count).max())
        index = (self.cached + self.begin - self.place0)[:, None] + torch.arange(longest, device=x.device)
        return x.transpose(1, 2)[self.row[:, None], index.clamp(0, x.shape[2] - 1)].transpose(1, 2)

    def tokens(
        self, x: Shaped[Tensor, "batch heads slots width"], kept: int, places: Int[Tensor, "pieces n"]
    ) -> Shaped[Tensor, "pieces heads n width"]:
        """The tokens at these places of their pieces; x holds the new tokens behind the `kept` ones that came before."""
        index = (kept + self.begin - self.place0)[:, None] + places
        return x.transpose(1, 2)[self.row[:, None], index.clamp(0, x.shape[2] - 1)].transpose(1, 2)

    def back(self, y: Shaped[Tensor, "pieces heads q_time width"]) -> Shaped[Tensor, "batch heads time width"]:
        """What belongs to the queries, in the rows where they were; 0 at pads."""
        if self.trivial:
            return y
        offset = torch.arange(self.queries_time, device=y.device)
        piece, at = (offset < self.count[:, None]).nonzero(as_tuple=True)
        rows = y.new_zeros(int(self.row[-1]) + 1, self.time, y.shape[1], y.shape[3])
        rows = rows.index_put((self.row[piece], self.begin[piece] + at), y.transpose(1, 2)[piece, at])
        return rows.transpose(1, 2)
