"""Text in and out of the engine: tokenizer, chat template, incremental detokeniser, stop strings. No HTTP, no torch."""
