"""The commands and the demonstration: they alone import training and interp together."""
