"""Model cards: the README.md beside the weights, made from recorded facts. Imports no torch."""

import json
from collections.abc import Mapping
from typing import Any

from tnlm.config import ModelConfig

_CARD = """\
---
{front}
---

# {title}

A causal language model for `tnlm`: {n_layer} layers, width {d_model}, {n_params:,} parameters, {mlp} MLP,
{attention} attention. {kind}

## Load

```python
import tnlm

model = tnlm.load({name})  # no remote code; config.json and model.safetensors are all there is
logits = model(tokens)  # (batch, seq) ids below {d_vocab_used} -> (batch, seq, {d_vocab})
logits, cache = model.run_with_cache(tokens)  # transformer-lens names: cache["blocks.0.hook_resid_post"]
```

## Architecture

{architecture}
"""


def model_card(
    config: ModelConfig,
    *,
    repo_id: str | None = None,
    source: str | Mapping[str, Any] | None = None,
    training: Mapping[str, Any] | None = None,
    verification: Mapping[str, Any] | None = None,
    license: str | None = None,
) -> str:
    """Text of a model card: Markdown with YAML front matter. Sections whose facts are not given are left out.

    Args:
        repo_id: ``owner/name`` for the example that loads the model; None writes a path in its place.
        source: Where the weights came from: a phrase, or facts such as ``repo``, ``revision``, ``sha256``. A ``repo``
            also becomes the ``base_model`` of the front matter.
        training: Facts such as ``data``, ``tokens``, ``val_loss``.
        verification: Facts such as ``max_abs_error_fp32``, compared with recorded outputs.
        license: Licence identifier of the Hub (``mit``); None writes that it is not known.
    """
    front: dict[str, Any] = {"library_name": "tnlm", "pipeline_tag": "text-generation"}
    front["tags"] = ["tnlm", "tensor-network", f"{config.mlp}-mlp", f"{config.attention}-attention"]
    if license is not None:
        front["license"] = license
    if isinstance(source, Mapping) and "repo" in source:
        front["base_model"] = source["repo"]
    facts = {name: value for name, value in config.to_dict().items() if value is not None}
    text = _CARD.format(
        front="\n".join(f"{key}: {json.dumps(value)}" for key, value in front.items()),
        title=repo_id or f"{config.n_layer}-layer {config.mlp}/{config.attention} tensor-network transformer",
        kind=_kind(config),
        name=json.dumps(repo_id or "path/to/this/folder"),
        architecture=_table(facts),
        n_params=config.n_params,
        **{k: facts[k] for k in ("n_layer", "d_model", "mlp", "attention", "d_vocab", "d_vocab_used")},
    )
    if training:
        text += f"\n## Training\n\n{_table(training)}\n"
    if verification:
        text += f"\n## Verification\n\nMeasured on loading, `tnlm verify` repeats it.\n\n{_table(verification)}\n"
    if source:
        text += f"\n## Source\n\n{source if isinstance(source, str) else _table(source)}\n"
    text += f"\n## Licence\n\n{license or 'Not known. Ask the owners of the weights before using them.'}\n"
    return text


def _kind(config: ModelConfig) -> str:
    if config.polynomial:
        return "The whole model is one polynomial of its token embeddings."
    if config.layers_polynomial:
        reasons = "; ".join(config.why_not_polynomial())
        return f"Each layer is a polynomial of its input. The whole model is not: {reasons}."
    return f"A baseline: {'; '.join(config.why_not_polynomial('layers'))}."


def _table(facts: Mapping[str, Any]) -> str:
    rows = [f"| {_cell(name)} | {_cell(value)} |" for name, value in facts.items()]
    return "\n".join(["| | |", "| --- | --- |", *rows])


def _cell(value: Any) -> str:
    text = json.dumps(value) if isinstance(value, bool | dict | list) else str(value)
    return " ".join(text.replace("|", "\\|").split())
