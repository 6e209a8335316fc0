"""Configs as words: what is spelled is read back as it was."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from experiments.config import REGISTRIES, SCHEMAS, parse, resolve
from experiments.words import changed, read_choices, spell, words_of
from registry import UserError

GROUPS = (*REGISTRIES, *SCHEMAS)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.from_regex(r"[a-z][a-z0-9_]{0,5}", fullmatch=True), inner, max_size=3),
    max_leaves=6,
)


def unquoted(value):
    if isinstance(value, dict):
        return {key: unquoted(item) for key, item in value.items()}
    return [unquoted(item) for item in value] if isinstance(value, list) else getattr(value, "text", value)


@settings(max_examples=300, deadline=None)
@given(value=PLAIN)
@example(value="A²")  # a word character to Python, none to Hydra's lexer
def test_any_plain_value_is_read_as_it_was_spelled(value):
    (override,) = parse([f"runs_dir={spell(value)}"])
    assert unquoted(override.value()) == value


def test_a_config_is_spelled_by_words_that_resolve_to_it():
    config = resolve(
        [
            *("variant=sliding_window", "variant.window=7", "position=longrope", "position.long_factors=[1,1.5,2]", "task=passkey"),
            *("optimizer.lr=1e-5", "trainer.stop_at=null", "model.pattern=['variant',{name:full,kv_heads:1}]", "study='two words'"),
        ]
    )
    assert resolve(words_of(config, GROUPS)) == config


def test_a_changed_key_replaces_its_word_and_a_changed_group_its_options():
    words = ["position=yarn", "position.factor=4", "seed=1", "positions=x"]
    assert changed(words, ["position=pi"]) == ["seed=1", "positions=x", "position=pi"]
    assert changed(words, ["position.factor=2"]) == ["position=yarn", "seed=1", "positions=x", "position.factor=2"]
    assert changed(words, []) == words


def test_a_group_is_chosen_by_a_file_that_names_it(tmp_path):
    file = tmp_path / "found.yaml"
    file.write_text("name: yarn\nfactor: 8\n")
    config = resolve([f"position={file}", "seed=3"])
    assert config["position"]["name"] == "yarn" and config["position"]["factor"] == 8 and config["seed"] == 3
    assert resolve([f"position={file}", "position.factor=2"])["position"]["factor"] == 2
    assert read_choices([f"study={file}"], GROUPS) == [f"study={file}"]


@pytest.mark.parametrize(
    "content, said", [(None, "cannot be read"), ("- 1", "key 'name'"), ("factor: 2", "key 'name'"), ("a: [", "not YAML")]
)
def test_a_file_that_names_nothing_is_refused(tmp_path, content, said):
    file = tmp_path / "found.yaml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UserError, match=said):
        resolve([f"position={file}"])


def test_a_file_with_an_unknown_option_is_refused_with_the_nearest_word(tmp_path):
    (tmp_path / "found.yaml").write_text("name: yarn\nfactr: 8\n")
    with pytest.raises(UserError, match="Did you mean 'factor'"):
        resolve([f"position={tmp_path}/found.yaml"])
