"""Subcommands of `trimtab-tuner`, one module each: `add_arguments(parser)` and `main(args)`. Loaded by `cli.py` on demand."""
