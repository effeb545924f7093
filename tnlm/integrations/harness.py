"""Scores on lm-eval's benchmark tasks, and on multiple-choice questions from a file, which needs no network."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tnlm.checkpoints.hub import offline_if_unreachable
from tnlm.integrations.model import wrap
from tnlm.integrations.vocabulary import hf_tokenizer
from tnlm.text.tokenizer import Tokenizer
from tnlm.transformer import Transformer

_FIELDS = {"context": str, "choices": list, "answer": int}


def evaluate_tasks(
    model: Transformer,
    tokenizer: Tokenizer,
    tasks: Sequence[str],
    *,
    limit: int | None = None,
    batch_size: int = 4,
) -> dict[str, dict[str, float]]:
    """Scores on lm-eval's tasks and their standard errors, ``{task: {metric: value}}``; a file is named by its stem.

    Log-likelihoods are sums over the continuation's tokens, over all ``d_vocab`` columns, after the softcap. If a
    question has no context, the end-of-text id precedes its choices, or a newline for tokenizers without that id.

    Args:
        tasks: Names that lm-eval knows (their data comes from the Hub or its cache), or paths of ``.json`` or
            ``.jsonl`` files with rows ``{"context": str, "choices": [str, ...], "answer": index}``. A choice
            follows the context directly, without a space between.
        limit: Number of documents of each task to use, from the first; ``None`` means all.
        batch_size: 1 for tasks that generate: their prompts differ in length, and padding on the left is refused.

    Raises:
        ValueError: lm-eval is not installed, a task is unknown, its data is not in the cache and the Hub cannot be
            reached, two files have the same stem, or a row has another form.
    """
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ValueError(f"benchmark tasks need lm-eval ({error}); in a clone: pip install -e '.[evals]'") from None
    if not tasks:
        raise ValueError("tasks must name at least one task")
    files = {task: _read_questions(Path(task)) for task in tasks if Path(task).suffix in (".json", ".jsonl")}
    if len({Path(file).stem for file in files}) < len(files):
        raise ValueError(f"files of questions must have names of their own, got {', '.join(files)}")
    manager = TaskManager(include_defaults=len(files) < len(tasks))
    unknown = [task for task in tasks if task not in files and not manager.match_tasks([task])]
    if unknown:
        raise ValueError(
            f"lm-eval has no task {', '.join(unknown)}; `lm-eval ls tasks` lists them, a path ends in .json or .jsonl"
        )
    lm = HFLM(
        pretrained=wrap(model),
        tokenizer=hf_tokenizer(tokenizer, n_ctx=model.config.n_ctx),
        batch_size=batch_size,
        max_length=model.config.n_ctx,
        backend="causal",
        device=str(model.embed.w_e.device),
        prefix_token_id=tokenizer.encode("\n")[0] if tokenizer.eot is None else tokenizer.eot,
    )
    with _hub_or_cache() if len(files) < len(tasks) else contextlib.nullcontext():
        results = simple_evaluate(
            lm,
            tasks=[_task(task, files[task]) if task in files else task for task in tasks],
            task_manager=manager,
            limit=limit,
            log_samples=False,
            bootstrap_iters=1000,
            random_seed=None,
            numpy_random_seed=None,
            torch_random_seed=None,
        )
    return {task: _numbers(scores) for task, scores in results["results"].items()}


@contextlib.contextmanager
def _hub_or_cache() -> Iterator[None]:
    """The Hub if it answers, else the cache of what came from it.

    Raises:
        ValueError: The Hub does not answer, and the cache does not hold what is needed.
    """
    import datasets.config

    before = datasets.config.HF_HUB_OFFLINE
    with offline_if_unreachable() as offline:
        datasets.config.HF_HUB_OFFLINE = offline
        try:
            yield
        except (ConnectionError, FileNotFoundError) as error:
            raise ValueError(
                f"the data of a task is not in the cache, and the Hub cannot be reached: {error}. Run once with a "
                "connection, or name a .json or .jsonl file of questions"
            ) from error
        finally:
            datasets.config.HF_HUB_OFFLINE = before


def _task(path: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """lm-eval's description of a multiple-choice task with these rows."""
    from datasets import Dataset

    return {
        "task": Path(path).stem,
        "custom_dataset": lambda **_: {"test": Dataset.from_list(rows)},
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "context",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "target_delimiter": "",
        "metric_list": [
            {"metric": metric, "aggregation": "mean", "higher_is_better": True} for metric in ("acc", "acc_norm")
        ],
    }


def _read_questions(path: Path) -> list[dict[str, Any]]:
    """The checked rows of a JSON list or of JSON lines."""
    if not path.is_file():
        raise ValueError(f"no file of questions at {path}")
    text = path.read_text(encoding="utf-8")
    lines = path.suffix == ".jsonl"
    try:
        rows = [json.loads(line) for line in text.splitlines() if line.strip()] if lines else json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} must be {'JSON lines' if lines else 'JSON'}: {error}") from None
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"{path} must hold a list of questions, got {type(rows).__name__} of length {len(rows)}")
    for number, row in enumerate(rows):
        if not _is_question(row):
            form = '{"context": str, "choices": [str, ...], "answer": index}'
            raise ValueError(f"{path}, question {number}: must be {form}, got {row!r}")
    return [{field: row[field] for field in _FIELDS} for row in rows]


def _is_question(row: Any) -> bool:
    fits = isinstance(row, dict) and all(isinstance(row.get(field), kind) for field, kind in _FIELDS.items())
    return fits and all(isinstance(c, str) and c for c in row["choices"]) and 0 <= row["answer"] < len(row["choices"])


def _numbers(scores: dict[str, Any]) -> dict[str, float]:
    """The numbers in lm-eval's ``{"acc,none": 0.5, ...}``, without filter names, labels and missing values."""
    return {
        name.removesuffix(",none"): float(value)
        for name, value in scores.items()
        if isinstance(value, int | float) and "," in name
    }
