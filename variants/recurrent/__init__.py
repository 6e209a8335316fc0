"""Mixers whose past is a state of fixed size."""
