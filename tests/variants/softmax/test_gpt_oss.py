"""The learned sink logit, with and without a window, is that of transformers' gpt-oss."""

from __future__ import annotations

import pytest
import torch
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention, GptOssRotaryEmbedding

from registry import variants
from tests.variants import oracles

BASE = 50.0


def gpt_oss(window: int | None) -> tuple[GptOssAttention, GptOssRotaryEmbedding]:
    """Their layer, four heads that share two, and their rotary tables. The sinks are large enough to take half of a row."""
    config = GptOssConfig(
        hidden_size=12,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        num_hidden_layers=1,
        sliding_window=window,
        layer_types=["full_attention" if window is None else "sliding_attention"],
        attention_bias=False,
        rope_parameters={"rope_type": "default", "rope_theta": BASE},
        attn_implementation="eager",
    )
    layer = GptOssAttention(config, layer_idx=0).double().eval()
    with torch.no_grad():
        layer.sinks.copy_(torch.tensor([-1.0, 0.0, 1.0, 2.0]))
    return layer, GptOssRotaryEmbedding(config)


@pytest.mark.parametrize("impl", ["sdpa", "torch", "reference"])
@pytest.mark.parametrize("window", [None, 1, 3, 9, 20])
def test_with_the_weights_of_gpt_oss_outputs_and_gradients_are_its_own(window, impl) -> None:
    theirs, tables = gpt_oss(window)
    name, options = ("gqa", {}) if window is None else ("sliding_window", {"window": window})
    position = {"name": "rope", "base": BASE}
    mixer = variants.build(name, dim=12, heads=4, head_dim=6, kv_heads=2, sink_logit=True, position=position, impl=impl, **options).double()
    with torch.no_grad():
        mixer.projections.inward.weight.copy_(torch.cat([part.weight for part in (theirs.q_proj, theirs.k_proj, theirs.v_proj)]))
        mixer.projections.outward.weight.copy_(theirs.o_proj.weight)
        mixer.sink.copy_(theirs.sinks)
    time = 9
    x = (3 * torch.randn(2, time, 12, dtype=torch.float64)).requires_grad_()
    positions = torch.arange(time).expand(2, -1)
    masked = create_causal_mask if window is None else create_sliding_window_causal_mask
    mask = masked(config=theirs.config, inputs_embeds=x, attention_mask=None, cache=None, position_ids=positions)
    expected, _ = theirs(x, position_embeddings=tables(x, positions), attention_mask=mask)
    got = mixer(x).y
    # Their tables are in fp32 whatever the model is in.
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-6)
    oracles.same_gradients(got, expected, [x], atol=2e-5)
    assert expected.std() > 0.1
    (mine,), (other,) = (torch.autograd.grad(y.sin().sum(), [sink]) for y, sink in ((got, mixer.sink), (expected, theirs.sinks)))
    torch.testing.assert_close(mine, other, rtol=0, atol=2e-5)
    assert other.abs().max() > 0.01
