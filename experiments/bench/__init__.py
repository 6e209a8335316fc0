"""Timing: candidates and peers on the same inputs, verified equal before they are timed, interleaved in one process."""
