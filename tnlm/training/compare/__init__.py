"""Curves of several runs, and how many more batches one arm needs than another."""
