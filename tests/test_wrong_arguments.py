"""Every public function refuses a wrong argument with a ValueError (or an OSError for a file), whatever its type.

Each function is called once as it is used; then one argument at a time becomes something else. A result is fine too:
``progress=[]`` means no.
"""

import functools
import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor

import tnlm
from tests.interp.builders import make_layer, noise
from tests.tiny_models import build, ids, tiny
from tnlm import interp, kernels, lens, text, training
from tnlm.text import tokenizer as tokenizers

pytestmark = pytest.mark.user_error

WRONG: Mapping[str, Any] = {
    "None": None,
    "'x'": "x",
    "-1": -1,
    "nan": math.nan,
    "inf": math.inf,
    "10**400": 10**400,
    "1/2": Fraction(1, 2),
    "an object": object(),
    "[]": [],
    "a tensor of three axes": torch.zeros(2, 3, 5),
    "a tensor without values": torch.zeros(2, device="meta"),
}


def changed(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A tensor with one axis more or less, in another dtype, without values, or not finite."""
    yield "one axis more", x[None]
    yield "one row", x[:1] if x.ndim else x
    yield "half precision", x.half()
    yield "of bools", x.bool()
    yield "of another kind", x.long() if x.is_floating_point() else x.double()
    yield "on meta", x.to("meta")
    if x.ndim:
        yield "one axis less", x[0]
        yield "without rows", x[:0]
    if x.is_floating_point():
        yield "not finite", x * math.nan
    elif x.dtype == torch.int64:
        yield "negative", x - 100


@functools.cache
def model() -> tnlm.Transformer:
    return build(tiny(norm_eps=0.0, logit_softcap=None))


@functools.cache
def pure() -> tnlm.Transformer:
    config = tnlm.ModelConfig.pure(
        d_vocab=11, n_layer=2, n_head=1, d_model=10, d_qk=4, n_ctx=17, mlp="none", d_hidden=0,
        x0_mixing=False, value_residual=False,
    )  # fmt: skip
    return build(config)


@functools.cache
def reader() -> tnlm.Transformer:
    return build(tiny(d_vocab=256, d_vocab_used=256))


def net() -> Any:
    return interp.extract(model())


def compose(first: Any, second: Any, residual: bool = False) -> Any:
    return interp.compose(first, second, residual=residual)


def layer(**more: Any) -> dict[str, Any]:
    return {"b": make_layer(), **more}


U, BYTES = noise(3), tokenizers.get("bytes")
HEAD: dict[str, Any] = {"tokens": ids(5)[:5], "target": 3}
CALLS: dict[str, Callable[[Any], Mapping[str, Any]]] = {
    "tnlm.generate": lambda _: {"model": model(), "tokens": ids(2, 3), "max_new_tokens": 2},
    "tnlm.load": lambda tmp: {"name_or_path": tnlm.save(model(), tmp / "saved", card=False)},
    "tnlm.save": lambda tmp: {"model": model(), "folder": tmp / "made", "card": False},
    "text.byte_lengths": lambda _: {"tokenizer": BYTES},
    "text.cross_entropy": lambda _: {"model": model(), "tokens": ids(3, 7)},
    "text.encode_prompt": lambda _: {"prompt": "ab", "tokenizer": BYTES},
    "text.find_tokenizer": lambda _: {"model": reader(), "given": "bytes"},
    "text.one_token": lambda _: {"name": "target", "text": "a", "tokenizer": BYTES},
    "text.probabilities": lambda _: {"logits": noise(2, 5), "temperature": 0.5, "top_k": 3, "top_p": 0.5},
    "text.token_losses": lambda _: {"logits": noise(2, 3, 5), "targets": ids(2, 3, limit=5)},
    "text.train_bpe": lambda _: {"texts": ["ab ab ab ab"], "d_vocab": 258},
    "kernels.bilinear_attention": lambda _: {n: noise(2, 5, 3, 4) for n in ("q1", "k1", "q2", "k2", "v")},
    "kernels.squared_attention": lambda _: {n: noise(2, 5, 3, 4) for n in ("q", "k", "v")},
    "lens.hook": lambda _: {"model": model()},
    "training.preset": lambda _: {"name": "nano", "mlp": "bilinear", "attention": "bilinear"},
    "training.token_counts": lambda tmp: {"run": tmp / "no-run"},
    "training.write_shard": lambda tmp: {"path": tmp / "x.bin", "tokens": [1, 2, 3]},
    "training.load_run": lambda tmp: {"folder": tmp / "no-run"},
    "interp.ablate": lambda _: {"net": net(), "tokens": ids(2, 6), "what": "blocks.1.hook_mlp_out"},
    "interp.ablation_edits": lambda _: {"net": net(), "tokens": ids(2, 6), "what": "blocks.1.hook_mlp_out"},
    "interp.alignment": lambda _: {"direction": noise(5), "gram": make_layer().gram("in")},
    "interp.attribute": lambda _: {"model": model(), "tokens": ids(5), "target": 3},
    "interp.bounds": lambda _: layer(u=U, radius2=5.0),
    "interp.copy_table": lambda _: {"net": net(), "layer": 1, "head": 0, "inputs": net().x0},
    "interp.cp": lambda _: layer(rank=2, sweeps=2, restarts=1),
    "interp.cycle_votes": lambda _: {"net": interp.extract(pure()), "period": 3, "position": 5},
    "interp.degrees": lambda _: {"f": torch.square, "x": noise(3), "n": 2},
    "interp.delta_ce": lambda _: {"net": net(), "edited": model(), "tokens": ids(2, 5)},
    "interp.edges": lambda _: {"net": net(), "samples": 5},
    "interp.effective_rank": lambda _: layer(u=U, kind="max"),
    "interp.eig": lambda _: layer(u=U, k=2, method="krylov", tol=1e-6),
    "interp.equal_part": lambda _: {"entries": torch.eye(3, dtype=torch.bool).expand(2, 3, 3).contiguous()},
    "interp.explain": lambda _: {"model": model(), "tokens": ids(5), "target": 3, "foil": 5, "components": 2},
    "interp.extract": lambda _: {"model_or_id": model()},
    "interp.fix_gauge": lambda _: layer(),
    "interp.follower_entries": lambda _: {"tokens": ids(2, 5)},
    "interp.haar_null": lambda _: {"a": make_layer(), "b": make_layer(seed=1)},
    "interp.hosvd": lambda _: layer(rank_out=2, rank_in=2),
    "interp.inertia": lambda _: layer(u=U, tol=1e-9),
    "interp.jacobian_kernel": lambda _: layer(second_moment=torch.eye(5, dtype=torch.float64)),
    "interp.layer_pairs": lambda _: layer(u=U, parts=noise(2, 5)),
    "interp.layer_shapley": lambda _: layer(u=U, parts=noise(2, 5), baseline=noise(5)),
    "interp.match": lambda _: {"table": noise(3, 3)},
    "interp.match_heads": lambda _: {"a": net().attention[0], "b": net().attention[1], "samples": 5},
    "interp.moments": lambda _: layer(mean=noise(5), cov=torch.eye(5, dtype=torch.float64), kind="gaussian"),
    "interp.path_table": lambda _: {"net": net(), "layer": 1, "path": 0, "top": 2},
    "interp.paths": lambda _: {
        "model": model(), "tokens": ids(5), "target": 3, "branches": ["blocks.2.hook_attn_out"]
    },
    "interp.pattern_table": lambda _: {
        "head": net().attention[1].head(0), "queries": net().x0[:3], "keys": net().x0[:2], "distance": 1
    },
    "interp.polynomial_coefficients": lambda _: {"f": torch.square, "degree": [2]},
    "interp.remove": lambda _: layer(u=U, values=noise(2), vectors=noise(5, 2)),
    "interp.report": lambda tmp: {"model": pure(), "path": tmp / "report.html", "tokens": ids(2, 6), "top": 2},
    "interp.similarity": lambda _: {"a": net(), "b": net(), "samples": 5, "distances": (0,), "permutations": 0},
    "interp.top_examples": lambda _: {"net": net(), "tokens": ids(3, 6), "layer": 1, "u": noise(30), "k": 2},
    "interp.top_tokens": lambda _: {"matrix": noise(5, 5), "k": 2, "tokens": [0, 1, 2, 3, 4]},
    "interp.trace_bounds": lambda _: {
        "trace": noise(3), "frobenius": noise(3).abs() + 3, "d": 5,
        "trace_error": torch.zeros(3, dtype=torch.float64), "squares_error": torch.zeros(3, dtype=torch.float64),
    },
    "interp.truncate": lambda _: layer(u=U, k=2),
    "interp.vocab_bounds": lambda _: {"net": net(), "layer": 1},
    "interp.vocab_eigs": lambda _: {"net": net(), "layer": 1, "k": 2, "tokens": [1, 2], "progress": False},
    "interp.vocab_moments": lambda _: {"net": net(), "layer": 1},
    "interp.with_mlp": lambda _: {"model": model(), "layers": {1: net().mlp[1]}},
    "compose": lambda _: {"first": make_layer(d_out=5), "second": make_layer(seed=1)},
}  # fmt: skip
ROOMS = {"tnlm": tnlm, "text": text, "kernels": kernels, "lens": lens, "training": training, "interp": interp}
NOT_CALLED = {
    "text.generate": "the same as tnlm.generate",
    "interp.compose": "takes any number of layers: here with two",
    "tnlm.push_to_hub": "needs the Hub; tests/checkpoints/test_hub.py has one",
    "training.train": "a whole run; its configuration is data that is checked (tests/test_fuzz.py)",
    "training.compare_arms": "takes the runs that load_run returns",
    **dict.fromkeys(
        ("kernels.linear", "kernels.rms_norm", "kernels.gated_projection", "kernels.unembedded_cross_entropy"),
        "one step inside a layer, called with the tensors of the layer; errors are those of torch",
    ),
}
ALLOWED = {
    ("text.token_losses", "targets", "negative"): "it runs inside compiled training steps, which read no ids",
}


def test_every_public_function_is_here():
    public = {
        f"{room}.{name}"
        for room, module in ROOMS.items()
        for name in module.__all__
        if isinstance(getattr(module, name), FunctionType)
    }
    assert public == (set(CALLS) - {"compose"}) | set(NOT_CALLED)


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_argument_is_a_value_error(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    room, _, function = name.rpartition(".")
    f = getattr(ROOMS[room], function) if room else compose
    call = dict(CALLS[name](tmp_path))
    wrong = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for argument, parameter in inspect.signature(f).parameters.items():
            if parameter.annotation in (bool, bool | str):  # any value is true or false
                continue
            values = dict(WRONG)
            if isinstance(call.get(argument), Tensor):
                values |= changed(call[argument])
            for what, value in values.items():
                if (name, argument, what) in ALLOWED:
                    continue
                try:
                    f(**{**call, argument: value})
                except (ValueError, OSError):
                    pass
                except Exception as error:
                    wrong.append(f"{argument} = {what}: {type(error).__name__}: {str(error)[:100]}")
    assert not wrong, f"{name}: {len(wrong)} raw errors\n" + "\n".join(wrong)
