"""Attention to what was selected: one file a variant."""
