"""Numerical cores: functions of tensors that know no module. Layout (batch, heads, time, head_dim)."""
