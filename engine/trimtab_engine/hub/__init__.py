"""Models from a hub that speaks the Hugging Face HTTP API. Only the engine process uses this, before it loads weights."""
