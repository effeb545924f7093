"""Layers and heads read in the vocabulary: rankings, tables, spectra of all tokens."""
