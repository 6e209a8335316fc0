"""Softmax attention and its kin: every weight is the exponential of a product, and a row of them sums to one."""
