"""transformers and lm-eval: Auto classes for every configuration, tokenizers, benchmark tasks.

Importing this module registers ``model_type="tnlm"``: ``AutoModelForCausalLM.from_pretrained(folder)`` reads what
:func:`tnlm.save` wrote, and its ``save_pretrained`` writes what :func:`tnlm.load` reads. No file carries code.
"""

from transformers import AutoConfig, AutoModelForCausalLM

from tnlm.integrations.harness import evaluate_tasks
from tnlm.integrations.model import TnlmConfig, TnlmForCausalLM, wrap
from tnlm.integrations.vocabulary import hf_tokenizer

__all__ = ["TnlmConfig", "TnlmForCausalLM", "evaluate_tasks", "hf_tokenizer", "wrap"]

AutoConfig.register("tnlm", TnlmConfig, exist_ok=True)
AutoModelForCausalLM.register(TnlmConfig, TnlmForCausalLM, exist_ok=True)
