"""Configs: what is refused, how it is answered, and what a config resolves to."""

from __future__ import annotations

import pytest

from experiments.config import resolve
from registry import UserError

PLUGIN = '''
"""A mixer."""
from variants.softmax.full import Full
from registry import variants

@variants.register("plugged", time="T^2", state="T", hooks=("rotate",), implementations=("reference",))
class Plugged(Full):
    """A plug-in.

    Options:
        flavour: any number.
    """

    def __init__(self, dim, heads, position=None, *, flavour: float = 1e-5, **options):
        super().__init__(dim, heads, position, **options)
'''


@pytest.mark.parametrize(
    "word, said",
    [
        ("variant.nam=x", "variant has no key 'nam'. Valid: causal"),
        ("variant.short_cov=3", "Did you mean 'short_conv'"),
        ("model.mixer=linear", "model has no key 'mixer'"),
        ("hydra.swep.dir=x", "Hydra only composes"),
        ("variant=liner", "no variant is named 'liner'. Did you mean 'linear'"),
        ("position=rop", "no position is named 'rop'. Did you mean 'rope'"),
        ("experiment=quikstart", "no experiment is named 'quikstart'. Did you mean 'quickstart'"),
        ("sed=1", "Did you mean 'seed'"),
        ("trainer.steps=abc", "trainer.steps: Value 'abc'"),
        ("model.layers=2.5", "model.layers: Value '2.5'"),
        ("trainer=3", "trainer is chosen by name. Valid: default"),
        ("variant=null", "variant is chosen by name. Valid: deltanet"),
        ("trainer.precision=[1]", "trainer.precision"),
        ("+new=1", "neither added nor deleted"),
        ("~seed", "neither added nor deleted"),
        ("variant.name=linear", "write variant=linear"),
        ("seed=1,2", "`attnlab sweep` takes it"),
        ("a b", "cannot read 'a b'"),
        ("model.dim=${nope}", "nope"),
    ],
)
def test_a_wrong_word_is_answered_in_a_few_lines(word, said):
    with pytest.raises(UserError) as caught:
        resolve([word])
    assert said in str(caught.value)
    assert len(str(caught.value).splitlines()) < 10


def test_numbers_like_1e_5_are_floats_from_the_command_line():
    assert resolve(["optimizer.lr=1e-5"])["optimizer"]["lr"] == 1e-5
    assert isinstance(resolve(["optimizer.lr=1"])["optimizer"]["lr"], float)


def test_every_registered_name_is_selectable_with_its_own_options():
    config = resolve(["variant=sliding_window", "variant.window=32", "task=passkey", "position=learned", "seed=3"])
    assert (config["variant"]["name"], config["variant"]["window"]) == ("sliding_window", 32)
    assert (config["task"]["name"], config["position"]["name"], config["seed"]) == ("passkey", "learned", 3)


def test_a_plugin_is_selectable_without_a_yaml_file(tmp_path):
    file = tmp_path / "plug.py"
    file.write_text(PLUGIN)
    config = resolve([f"plugins=[{file}]", "variant=plugged", "variant.short_conv=3"])
    assert config["variant"]["flavour"] == 1e-5 and config["variant"]["short_conv"] == 3
    with pytest.raises(UserError, match="Did you mean 'flavour'"):
        resolve([f"plugins=[{file}]", "variant=plugged", "variant.flavor=2"])
    with pytest.raises(UserError, match=r"flavour: Value 'much'"):
        resolve([f"plugins=[{file}]", "variant=plugged", "variant.flavour=much"])


def test_a_plugin_that_is_unavailable_is_named_where_its_variant_is_missed():
    with pytest.raises(UserError, match=r"/nowhere\.py is unavailable"):
        resolve(["plugins=[/nowhere.py]", "variant=theirs"])


def test_the_resolved_config_is_plain_and_repeats_itself():
    import json

    config = resolve(["experiment=quickstart"])
    assert json.loads(json.dumps(config)) == config
    assert config["task"]["length"] == 32 and config["study"] == "quickstart"
