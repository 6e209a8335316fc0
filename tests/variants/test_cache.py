"""Slots that grow in place, and who may write where."""

from __future__ import annotations

import copy

import torch

from registry import variants
from variants.cache import Slots


def numbers(start: int, count: int) -> torch.Tensor:
    return torch.arange(start, start + count).view(1, -1, 1).float()


@torch.no_grad()
def test_what_is_appended_stands_behind_what_was_there() -> None:
    slots = Slots(numbers(0, 3))
    for start in range(3, 40):
        slots = slots.append(numbers(start, 1))
        assert slots.tensor.flatten().tolist() == list(range(start + 1))


@torch.no_grad()
def test_a_thousand_steps_move_the_buffer_a_dozen_times() -> None:
    slots, places = Slots(torch.zeros(2, 0, 4)), set()
    for _ in range(1000):
        slots = slots.append(torch.zeros(2, 1, 4))
        places.add(slots.tensor.data_ptr())
    assert len(places) <= 12


@torch.no_grad()
def test_the_same_slots_may_be_continued_twice() -> None:
    start = Slots(numbers(0, 2)).append(numbers(2, 1))
    first, second = start.append(numbers(10, 1)), start.append(numbers(20, 2))
    first = first.append(numbers(11, 1))
    assert start.tensor.flatten().tolist() == [0, 1, 2]
    assert first.tensor.flatten().tolist() == [0, 1, 2, 10, 11]
    assert second.tensor.flatten().tolist() == [0, 1, 2, 20, 21]


def test_with_gradients_recorded_nothing_is_written_in_place() -> None:
    leaf = numbers(0, 2).requires_grad_()
    slots = Slots(leaf)
    for start in range(2, 5):
        slots = slots.append(numbers(start, 1).requires_grad_())
    slots.tensor.pow(2).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.flatten().tolist() == [0, 2]
    with torch.no_grad():
        longer = slots.append(numbers(9, 1))
    assert not longer.tensor.requires_grad
    assert leaf.tolist() == numbers(0, 2).tolist()


def test_what_is_frozen_may_still_be_differentiated_through() -> None:
    """Keys need no gradient here, and yet backward reads them as they were at each step."""
    mixer, x = variants.build("full", dim=8, heads=2, sink_logit=True), torch.randn(1, 6, 8)
    for name, parameter in mixer.named_parameters():
        parameter.requires_grad_(name == "sink")
    expected = torch.autograd.grad(mixer(x).y.pow(2).sum(), mixer.sink)[0]
    state, loss = mixer.init_state(1), torch.zeros(())
    for t in range(6):
        y, state, _ = mixer(x[:, t : t + 1], state=state)
        loss = loss + y.pow(2).sum()
    torch.testing.assert_close(torch.autograd.grad(loss, mixer.sink)[0], expected)


def test_slots_made_in_inference_mode_go_on_outside_it() -> None:
    with torch.inference_mode():
        slots = Slots(numbers(0, 1)).append(numbers(1, 1))
    with torch.no_grad():
        assert slots.append(numbers(2, 1)).tensor.flatten().tolist() == [0, 1, 2]


def test_a_copied_state_goes_on_by_itself() -> None:
    mixer, x = variants.build("full", dim=8, heads=2), torch.randn(1, 6, 8)
    with torch.no_grad():
        state = mixer(x[:, :4], state=mixer.init_state(1)).state
        copied = copy.deepcopy(state)
        ours, theirs = (mixer(x[:, 4:], state=one) for one in (state, copied))
    assert torch.equal(ours.y, theirs.y)
    assert torch.equal(ours.state["keys"], theirs.state["keys"])
    assert state.nbytes == copied.nbytes
    assert state["keys"].shape[1] == 4
