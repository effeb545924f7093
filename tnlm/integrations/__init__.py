"""Bridges to other libraries, each imported by name: ``import tnlm.integrations.hf``."""
