"""HTTP process: OpenAI surface, admin API, metrics, tokenising. Never imports torch."""
