"""Attention variants, position schemes, their numerical cores and the checks they must pass."""
