"""One prediction at a time: a logit as a sum of paths, sources and components, and their removal."""
