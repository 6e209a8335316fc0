"""What a process of a group does in tests of rows that are split over processes: a module that a fresh process can import."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from registry import variants
from variants.context import split_rows
from variants.contract import Context, default_positions
from variants.ops import reference, ring
from variants.ops.attention import Sight
from variants.ops.ranks import Processes, Ring

#: Rows of a length that 2, 3 and 4 do not divide.
TIME = 37


def start(rank: int, work: Callable[[dist.ProcessGroup, int], None], largest: int, rendezvous: str) -> None:
    """Join the group, and work in every group of 2 and more processes that begins with the first."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=largest)
    for size in range(2, largest + 1):
        group = dist.new_group(list(range(size)))
        if rank < size:
            work(group, size)
    dist.barrier()
    dist.destroy_process_group()


def attention_is_that_of_one_process(group: dist.ProcessGroup, size: int) -> None:
    """Outputs and all three gradients in fp64, each process its own part."""
    torch.manual_seed(0)
    shapes = (2, 4, TIME, 8), (2, 2, TIME, 8), (2, 2, TIME, 6)
    arriving = torch.randn(2, 4, TIME, 6, dtype=torch.float64)
    held = Ring(Processes(group), TIME)
    before = torch.cat([torch.arange(TIME)[None], torch.cat([torch.arange(9), torch.arange(TIME - 9)])[None]])
    for sight in (Sight(), Sight(causal=False), Sight(window=6), Sight(window=5, sinks=2), Sight(before=before)):
        tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
        expected = reference.attention(*tensors, sight=sight)
        y = ring.attention(*(_part(x, held) for x in tensors), held, sight=sight)
        torch.testing.assert_close(y, _part(expected, held), rtol=1e-11, atol=1e-11)
        mine = torch.autograd.grad((y * _part(arriving, held)).sum(), tensors)
        right = torch.autograd.grad((expected * arriving).sum(), tensors)
        for got, wanted in zip(mine, right, strict=True):
            torch.testing.assert_close(_part(got, held), _part(wanted, held), rtol=1e-10, atol=1e-10)


def mixers_are_those_of_one_process(group: dist.ProcessGroup, size: int) -> None:
    """Whole rows put together again, and gradients of inputs and parameters, of a mixer of each kind."""
    for name, options in MIXERS.items():
        torch.manual_seed(0)
        mixer: Any = variants.build(name, dim=16, heads=4, **options).double()
        x = torch.randn(2, TIME, 16, dtype=torch.float64, requires_grad=True)
        arriving = torch.randn(2, TIME, 16, dtype=torch.float64)
        valid = torch.arange(TIME) < torch.tensor([[TIME], [TIME - 5]])
        context = default_positions(x, Context(valid=valid), None)
        expected = mixer(x, context).y
        part, told = split_rows(x, context, Processes(group))
        assert told.split is not None
        y = told.split.ring.whole(mixer(part, told).y, replicated=True)
        torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")
        tensors = [x, *mixer.parameters()]
        # Every process has the loss of whole rows, so that the mean over processes of what each sends back is its gradient.
        mine = torch.autograd.grad((y * arriving).sum(), tensors)
        right = torch.autograd.grad((expected * arriving).sum(), tensors)
        for got, wanted in zip(mine, right, strict=True):
            dist.all_reduce(got, group=group)
            torch.testing.assert_close(got / size, wanted, rtol=1e-8, atol=1e-8, msg=lambda text, name=name: f"{name}: {text}")


MIXERS: dict[str, dict[str, Any]] = {
    "full": {"position": "alibi", "kv_heads": 2, "short_conv": 3},
    "sliding_window": {"window": 7, "position": "rope"},
    "gla": {"short_conv": 3},
    "gated_deltanet": {},
    "rwkv6": {},
    "mamba": {},
    "mamba2": {},
}


def attention_is_that_of_ring_attention_pytorch(group: dist.ProcessGroup, size: int) -> None:
    """In fp32. Its processes hold consecutive stretches of a row, and its query head h reads key head h mod kv_heads."""
    if size != dist.get_world_size():
        return  # it knows the whole world alone
    from ring_attention_pytorch.ring_flash_attention import ring_flash_attn

    torch.manual_seed(0)
    time, heads, groups, bucket = 8 * size, 4, 2, 4
    q, k, v = (torch.randn(2, n, time, 8, requires_grad=True) for n in (heads, groups, groups))
    arriving, rank = torch.randn(2, heads, time, 8), dist.get_rank()
    held, stretch = Ring(Processes(group), time), slice(rank * 8, rank * 8 + 8)
    order = torch.arange(heads).view(groups, -1).T.flatten()  # where its heads find the same keys as ours
    for causal in (True, False):
        given = [x[:, :, stretch].transpose(1, 2) for x in (q[:, order], k, v)]
        theirs = ring_flash_attn(*given, None, causal, bucket, True, False, None, size)
        their_grads = torch.autograd.grad((theirs * arriving[:, order, stretch].transpose(1, 2)).sum(), (q, k, v))
        y = ring.attention(*(_part(x, held) for x in (q, k, v)), held, sight=Sight(causal=causal))
        my_grads = torch.autograd.grad((y * _part(arriving, held)).sum(), (q, k, v))
        whole = held.whole(y.transpose(1, 2)).transpose(1, 2)
        torch.testing.assert_close(whole[:, order, stretch], theirs.transpose(1, 2), rtol=1e-4, atol=1e-5)
        for x in (*my_grads, *their_grads):
            dist.all_reduce(x)
        torch.testing.assert_close(my_grads[0], their_grads[0], rtol=1e-4, atol=1e-5)
        # 0.5.20 takes what arrived at its last pass and what it sent for dk and dv, which are the two halves of either.
        torch.testing.assert_close(my_grads[1] + my_grads[2], their_grads[1], rtol=1e-4, atol=1e-5)


def _part(x: Tensor, held: Ring) -> Tensor:
    return held.part(x.transpose(1, 2)).transpose(1, 2)
