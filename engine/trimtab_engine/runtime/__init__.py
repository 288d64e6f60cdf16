"""Runs scheduler steps on a device (torch): KV memory, batches, sampling, the engine process. Knows nothing of HTTP."""
