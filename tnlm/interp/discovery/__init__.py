"""Connections between heads and layers, found from the weights."""
