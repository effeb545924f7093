"""One layer at a time: its tensor, spectra, decompositions, statistics and similarity."""
