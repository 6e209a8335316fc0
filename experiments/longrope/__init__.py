"""The search for LongRoPE's factors: what is searched, how, and what a candidate scores on a trained model."""
