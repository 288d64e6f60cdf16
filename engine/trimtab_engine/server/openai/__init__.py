"""The OpenAI-compatible surface of the serving port: completions, chat, models, tokenize."""
