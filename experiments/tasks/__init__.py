"""Synthetic long-context tasks behind the contract of `experiments.tasks.contract`."""
