# %% [markdown]
# # When is attention without softmax cheaper?
#
# `(q1.k1)(q2.k2) = vec(q1 q2') . vec(k1 k2')`: all a query needs of the past is one state, the sum of
# `vec(k1 k2') v'`. So bilinear attention has a quadratic form, which costs as the square of the length, and a recurrent
# one, which is linear in the length but costs as the cube of the head width. Where do they cross, and what do they hold
# in memory? Counts are asserted; times are shown.

# %%
import time

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import tnlm
from tnlm.cache import Cache, position_numbers, state_numbers
from tnlm.interp.views.plot import lines
from tnlm.kernels import bilinear_attention, chunked

torch.set_num_threads(1)
generator = torch.Generator().manual_seed(0)


def operands(seq, d, dtype=torch.float32):
    return [torch.randn(1, seq, 1, d, generator=generator, dtype=dtype) for _ in range(5)]


# %% [markdown]
# ## The two forms are one function

# %%
inputs = operands(300, 8, torch.float64)
quadratic = bilinear_attention(*inputs, implementation="eager")
recurrent = bilinear_attention(*inputs, implementation="recurrent")
print(f"largest difference {float((quadratic - recurrent).abs().max()):.1e}")
assert torch.allclose(quadratic, recurrent, rtol=1e-10, atol=1e-12)

# %% [markdown]
# ## Predicted and counted crossover
#
# Per head, in multiply-adds: quadratic `n (n + 1) / 2` visible pairs times `3 d` (two scores and the value), recurrent
# `2 n d**3` (update and query of a state of `d**2` by `d`). They are equal near `n = 4 d**2 / 3`: 85 for `d = 8`,
# 21,845 for `d = 128`. PyTorch's counter measures what is executed: the dense definition does not skip the masked half,
# and the recurrent form folds 128 tokens at a time, whose products with each other are quadratic. So the counted
# crossover differs from the ideal one.


# %%
def predicted(seq, d):
    """FLOPs of the quadratic form with and without the masked half, and of the state alone."""
    return {"visible": 2 * 3 * d * seq * (seq + 1) // 2, "dense": 2 * 3 * d * seq**2, "state": 2 * 2 * seq * d**3}


def counted(implementation, seq, d):
    with FlopCounterMode(display=False) as counter:
        bilinear_attention(*operands(seq, d), implementation=implementation)
    return counter.get_total_flops()


d = 8
lengths = [64, 128, 256, 512, 1024, 2048]
counts = {name: [counted(name, n, d) for n in lengths] for name in ("eager", "chunked", "recurrent")}
assert counts["eager"] == [predicted(n, d)["dense"] for n in lengths]
assert counts["chunked"] == [predicted(n, d)["visible"] for n in lengths]
doubling = counts["recurrent"][-1] / counts["recurrent"][-2]
assert 1.9 < doubling < 2.1, "linear in the length"
assert counts["eager"][-1] == 4 * counts["eager"][-2], "quadratic in the length"
ideal = next(n for n in range(1, 10**6) if predicted(n, d)["visible"] >= predicted(n, d)["state"])
crossed = next(n for n, quadratic, linear in zip(lengths, counts["eager"], counts["recurrent"]) if linear < quadratic)
print(
    f"ideal crossover {ideal}, near 4 d**2 / 3 for d = {d}; the recurrent form executes fewer FLOPs from {crossed} on"
)
assert abs(ideal - 4 * d**2 / 3) < 2
assert ideal <= crossed < lengths[-1]

# %%
figure = lines(
    {f"{name}, counted": (lengths, values) for name, values in counts.items()}
    | {"state alone, predicted": (lengths, [predicted(n, d)["state"] for n in lengths])},
    title=f"FLOPs of one head, d = {d}",
    x="tokens",
    y="FLOPs",
    subtitle="counted by PyTorch in executed operations",
)
figure.update_xaxes(type="log").update_yaxes(type="log")


# %% [markdown]
# ## Process time
#
# Process time of one thread, the least of three calls; not asserted, as it depends on the machine and its load. Small
# matrices do not run at the speed of large ones, so times cross later than counts do. The numbers for the published
# widths are in `benchmarks/results`, CPU only.


# %%
def seconds(implementation, seq, d):
    inputs, times = operands(seq, d), []
    for _ in range(3):
        start = time.process_time()
        bilinear_attention(*inputs, implementation=implementation)
        times.append(time.process_time() - start)
    return max(min(times), 1e-6)


timed = {name: (lengths, [1e3 * seconds(name, n, d) for n in lengths]) for name in ("eager", "chunked", "recurrent")}
figure = lines(timed, title=f"Time of one head, d = {d}", x="tokens", y="process time (ms)", subtitle="one CPU thread")
figure.update_xaxes(type="log").update_yaxes(type="log")

# %% [markdown]
# ## Memory: the idea of flash attention
#
# The definition holds all `n**2` scores. Working through blocks of queries and keys, as flash attention does, holds a
# block at a time; without a softmax there is not even a running maximum to correct. We record the largest array that
# each form makes.


# %%
class Largest(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor that an operation returned."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def largest(implementation, seq, d):
    inputs = operands(seq, d)
    with Largest() as seen:
        if implementation == "chunked":  # below its operator, which is opaque
            chunked.bilinear_forward(*inputs, True, 1 / d**2)
        else:
            bilinear_attention(*inputs, implementation=implementation)
    return seen.elements


peaks = {name: (lengths, [largest(name, n, d) for n in lengths]) for name in ("eager", "chunked", "recurrent")}
print({name: values[-1] for name, (_, values) in peaks.items()})
assert peaks["eager"][1] == [n**2 for n in lengths]
assert peaks["chunked"][1][-1] <= lengths[-1] ** 2 // 4, "blocks, not the square"
assert peaks["recurrent"][1][-1] < 2.1 * peaks["recurrent"][1][-2], "at most linear in the length"

# %%
figure = lines(peaks, title=f"Largest array, d = {d}", x="tokens", y="elements", subtitle="one head, forward")
figure.update_xaxes(type="log").update_yaxes(type="log")

# %% [markdown]
# ## Decoding: a cache that grows, a state that does not
#
# Keys and values of every past token, or one state. The state holds fewer numbers above `d_qk**2 d / (2 d_qk + d)`
# tokens: from 86 at width 16, from 5,462 at the published 128. `tnlm.generate(cache="auto")` decides by this count.

# %%
decoded = {}
for width in (16, 128):
    config = tnlm.ModelConfig.released(d_vocab=32, n_layer=1, n_head=1, d_model=width, n_ctx=8192)
    decoded[width] = next(n for n in range(1, 8192) if n * position_numbers(config) > state_numbers(config))
print(decoded)
assert decoded == {16: 86, 128: 5462}

model = tnlm.Transformer(tnlm.ModelConfig.released(d_vocab=32, n_layer=2, n_head=2, d_model=16, n_ctx=64)).double()
for parameter in model.parameters():
    torch.nn.init.normal_(parameter, std=0.5, generator=generator)
prompt = torch.randint(32, (1, 40), generator=generator)
with torch.no_grad():
    expected = model(prompt)
    for recurrent in (False, True):
        cache = Cache(model.config, recurrent=recurrent)
        pieces = [model(prompt[:, i : i + 1], cache=cache) for i in range(40)]
        assert torch.allclose(torch.cat(pieces, dim=1), expected, rtol=1e-8, atol=1e-8)
continued = [tnlm.generate(model, prompt, 8, temperature=0, cache=kind) for kind in ("kv", "recurrent", "none")]
assert all(torch.equal(out, continued[0]) for out in continued)

# %%
config = tnlm.ModelConfig.released(d_vocab=32, n_layer=1, n_head=1, d_model=16, n_ctx=8192)
past = list(range(0, 257, 16))
lines(
    {
        "keys and values": (past, [n * position_numbers(config) for n in past]),
        "recurrent state": (past, [state_numbers(config)] * len(past)),
    },
    title="Numbers kept per layer while decoding, d = 16",
    x="tokens so far",
    y="numbers",
    subtitle="exact counts",
)
