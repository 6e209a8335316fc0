"""Hydra configuration: presets and experiments. The schemas come from the code (experiments.settings and the registries)."""
