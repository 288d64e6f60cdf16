"""Attention kernels: one signature, several implementations. `reference` is the plain torch one, and the oracle."""
