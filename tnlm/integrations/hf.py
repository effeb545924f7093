"""These models in transformers and lm-eval: Auto classes, tokenizers, benchmark tasks.

Importing this module registers ``model_type="tnlm"``: ``AutoModelForCausalLM.from_pretrained(folder)`` reads a
folder that :func:`tnlm.save` wrote, and :func:`tnlm.load` reads what ``save_pretrained`` writes. No file holds code.
"""

from transformers import AutoConfig, AutoModelForCausalLM

from tnlm.integrations.harness import evaluate_tasks
from tnlm.integrations.model import TnlmConfig, TnlmForCausalLM, wrap
from tnlm.integrations.vocabulary import hf_tokenizer

__all__ = ["TnlmConfig", "TnlmForCausalLM", "evaluate_tasks", "hf_tokenizer", "wrap"]

AutoConfig.register("tnlm", TnlmConfig, exist_ok=True)
AutoModelForCausalLM.register(TnlmConfig, TnlmForCausalLM, exist_ok=True)
