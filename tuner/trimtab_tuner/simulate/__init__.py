"""Simulated serving: discrete events around the engine's own scheduler, in simulated time only.

`simulate.simulate` replays a trace without a server and returns what a replay would; `cost.py` and `presets.py` say how long a
step takes. Nothing here reads a clock, and a test fails if something does.
"""
