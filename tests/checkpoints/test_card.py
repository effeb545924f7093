"""Model cards state what is known, parse as front matter, and never guess a licence."""

import ast
import subprocess
import sys

import pytest
import yaml

from tnlm.checkpoints.card import model_card
from tnlm.config import ModelConfig

CONFIG = ModelConfig.released(n_layer=3, n_head=2, d_model=32, d_vocab=96)


def front_matter(text: str) -> dict:
    _, front, _ = text.split("---\n", 2)
    return yaml.safe_load(front)


def test_front_matter_and_architecture():
    text = model_card(CONFIG)
    front = front_matter(text)
    assert front["library_name"] == "tnlm"
    assert "bilinear-mlp" in front["tags"]
    assert not {"license", "base_model"} & front.keys()
    assert "auto_map" not in text
    assert f"{CONFIG.n_params:,} parameters" in text
    for name, value in CONFIG.to_dict().items():
        assert value is None or f"| {name} | " in text
    assert "| x0_mixing | true |" in text


def test_sections_appear_only_with_facts():
    bare = model_card(CONFIG)
    assert [line for line in bare.splitlines() if line.startswith("## ")] == [
        "## Load",
        "## Architecture",
        "## Licence",
    ]
    assert "Not known." in bare
    full = model_card(
        CONFIG,
        repo_id="someone/tiny",
        source={"repo": "other/original", "revision": "0" * 40},
        training={"data": "fineweb10B", "val_loss": 3.25},
        verification={"max_abs_error_fp32": 2.5e-6},
        license="mit",
    )
    front = front_matter(full)
    assert (front["license"], front["base_model"]) == ("mit", "other/original")
    assert "| max_abs_error_fp32 | 2.5e-06 |" in full
    assert "| data | fineweb10B |" in full
    assert "| revision | " + "0" * 40 in full
    assert 'tnlm.load("someone/tiny")' in full
    assert "Not known." not in full


def test_snippet_is_python():
    snippet = model_card(CONFIG, repo_id="someone/tiny").split("```python\n")[1].split("```")[0]
    names = {node.attr for node in ast.walk(ast.parse(snippet)) if isinstance(node, ast.Attribute)}
    assert names == {"load", "run_with_cache"}


def test_cells_cannot_break_the_table():
    text = model_card(CONFIG, training={"note": "a | b\n## Not a heading"})
    assert "| note | a \\| b ## Not a heading |" in text


@pytest.mark.parametrize(
    "config, sentence",
    [
        (
            ModelConfig.pure(d_vocab=7, n_layer=1, n_head=1, d_model=4, d_hidden=3, n_ctx=5),
            "one polynomial of its token",
        ),
        (CONFIG, 'The whole model is not: RMS norms divide by a root (norm="rms"); QK-norm divides by a root'),
        (CONFIG.replace(mlp="swiglu"), "A baseline: the swiglu MLP is not polynomial: silu is not a polynomial."),
        (
            CONFIG.replace(mlp="swiglu", attention="softmax"),
            "polynomial; the softmax attention is not polynomial",
        ),
    ],
)
def test_says_what_is_polynomial(config, sentence):
    assert sentence in model_card(config)


def test_imports_no_torch():
    code = "import sys, tnlm.checkpoints.card; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_example_names_ids_and_logits_of_their_own_sizes():
    """70 of 96 ids are used: prompts hold the used ones, logits are over all."""
    text = model_card(CONFIG.replace(d_vocab_used=70))
    assert "ids below 70 -> (batch, seq, 96)" in text
    assert "3 layers, width 32," in text
