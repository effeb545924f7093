"""docs/points.md lists exactly the points that models have, with their shapes; and its example runs."""

import re
from pathlib import Path

import pytest
import torch

from tests.tiny_models import build, ids, tiny
from tnlm.points import is_point, record

PAGE = Path(__file__).parents[1] / "docs" / "points.md"
CONFIGS = {
    "released": tiny(),
    "softmax": tiny(attention="softmax", mlp="relu2"),
    "squared_normalized": tiny(attention="squared_normalized", mlp="swiglu", qk_norm=False),
    "differential": tiny(attention="differential", mlp="squared", qk_bias=True),
    "pure": tiny(norm="none", qk_norm=False, embedding_norm=False, logit_softcap=None, attention="squared"),
    "no norm": tiny(norm="none"),
    "attention only": tiny(mlp="none", x0_mixing=False, value_residual=False),
    "mlp only": tiny(attention="none"),
    "no final norm": tiny(final_norm=False),
    "no layers": tiny(n_layer=0),
}


def rows():
    pattern = re.compile(r"\| `([\w.]+)`(?: \(ours\))? \| ([\w ]+) \| ([\w -]+) \| .+ \|")
    return [pattern.fullmatch(line).groups() for line in PAGE.read_text().splitlines() if line.startswith("| `")]


def present(config):
    norm, attention, mlp = config.norm == "rms", config.attention != "none", config.mlp != "none"
    pairs = config.n_qk == 2
    return {
        "always": True,
        "final norm": config.has_final_norm,
        "embedding norm": norm and config.embedding_norm,
        "ln_embed": config.embedding_norm,
        "attention": attention,
        "norm and attention": norm and attention,
        "QK-norm": config.qk_norm and attention,
        "QK-norm and two pairs": config.qk_norm and pairs,
        "two pairs": pairs,
        "MLP": mlp,
        "norm and MLP": norm and mlp,
        "two encoders": config.mlp_gated,
    }


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_table_lists_every_point_with_its_shape(config):
    size = {"b": 2, "s": 5, "h": 3, "d": 4, "1": 1, "d_head": 10, "d_model": 30, "d_hidden": 7}
    expected = {}
    for name, shape, condition in rows():
        for layer in range(config.n_layer) if name.startswith("blocks.i.") else [None]:
            if present(config)[condition]:
                expected[name.replace(".i.", f".{layer}.")] = tuple(size[axis] for axis in shape.split())
    model = build(config)
    names = [name for name, _ in model.named_modules() if is_point(name)]
    seen = record(model, ids(2, 5), names)
    del seen["logits"]
    assert {name: tuple(value.shape) for name, value in seen.items()} == expected
    assert set(names) == set(expected)


def test_every_row_of_the_table_is_read():
    lines = PAGE.read_text().split("|---|---|---|---|\n")[1].split("\n\n")[0].splitlines()
    assert len(rows()) == len(lines) > 40


def test_example_of_the_page_runs():
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL).group(1)
    scope = {}
    exec(code, scope)
    assert scope["pattern"].shape == (1, 2, 5, 5)
    assert scope["logits"].shape == (1, 5, 11)
    assert torch.equal(scope["pattern"], scope["pattern"].tril())
