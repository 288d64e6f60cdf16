"""Documents that Python's own JSON reader takes, or trips over with something else than a ValueError."""

BROKEN_JSON = (
    "[" * 100_000,
    '{"source": "\\ud800"}',
    '{"lease_s": NaN}',
    '{"lease_s": Infinity}',
    '{"lease_s": 1e999}',
    '{"generation": ' + "9" * 5000 + "}",
)
