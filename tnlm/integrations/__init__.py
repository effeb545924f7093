"""These models in other libraries: ``import tnlm.integrations.hf`` for transformers and lm-eval."""
