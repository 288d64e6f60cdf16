"""Traces, load replay, tuning studies and reports of Trimtab. Never imports torch."""
