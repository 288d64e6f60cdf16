"""Request lengths of the Azure LLM inference traces of 2023 (code and conversation), from the public files or from a stand-in.

`TRIMTAB_TRACES` names a folder with `azure_llm_2023_code.csv` and `azure_llm_2023_conv.csv`, the two CSV files of
https://github.com/Azure/AzurePublicDataset (AzureLLMInferenceTrace_{code,conv}.csv, CC-BY-4.0, "Splitwise", ISCA'24). Without it,
lengths are drawn from the quantiles below, which were computed from those files; prompt and output independently, as their
correlation there is 0.00 and -0.11. Arrivals are the benchmark's own: only lengths are taken from here.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trimtab_tuner import trace as traces
from trimtab_tuner.trace import Trace, TraceRequest

NAMES = ("code", "conv")
VARIABLE = "TRIMTAB_TRACES"

AT = (0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.925, 0.95, 0.975, 0.99, 0.999, 1)
PROMPT = {
    "code": (3, 17, 75, 147, 385, 770, 1075, 1469, 1909, 2433, 3192, 3920, 5187, 6097, 7303, 7435, 7436, 7437, 7437),
    "conv": (2, 29, 181, 207, 387, 403, 703, 1020, 1071, 1130, 1315, 1876, 2734, 4075, 4083, 4092, 4142, 6179, 14050),
}  # fmt: skip
OUTPUT = {
    "code": (6, 6, 6, 7, 8, 9, 11, 13, 16, 20, 29, 39, 55, 69, 90, 145, 251, 825, 1899),
    "conv": (7, 16, 41, 54, 77, 91, 103, 129, 177, 384, 400, 411, 424, 430, 451, 522, 601, 954, 1000),
}  # fmt: skip
_STAND_IN_ROWS = 20_000


@dataclass(frozen=True, slots=True)
class Lengths:
    """Prompt and output tokens, one entry a request; `source` says whether they are the public rows."""

    name: str
    prompt: NDArray[np.int64]
    output: NDArray[np.int64]
    source: str

    def poisson(self, requests: int, rate_rps: float, seed: int) -> Trace:
        """So many requests at that rate. One seed means the same requests and the same unit gaps at every rate."""
        rng = np.random.default_rng(seed)
        rows = rng.choice(len(self.prompt), requests, replace=requests > len(self.prompt))
        at = np.cumsum(rng.standard_exponential(requests)) / rate_rps
        made = zip(at.tolist(), self.prompt[rows].tolist(), self.output[rows].tolist(), strict=True)
        return Trace(tuple(TraceRequest(*each) for each in made), f"azure 2023 {self.name}", "lengths")


def load(name: str) -> Lengths:
    """The lengths of `code` or `conv`: the public rows when `TRIMTAB_TRACES` is set, else the stand-in."""
    folder = os.environ.get(VARIABLE)
    if folder:
        path = Path(folder) / f"azure_llm_2023_{name}.csv"
        rows = traces.load(path).requests
        return Lengths(
            name,
            np.array([row.prompt_tokens for row in rows]),
            np.array([row.output_tokens for row in rows]),
            "public",
        )
    rng = np.random.default_rng(2023)
    drawn = [
        np.rint(np.interp(rng.random(_STAND_IN_ROWS), AT, table[name])).astype(np.int64)
        for table in (PROMPT, OUTPUT)
    ]
    return Lengths(name, drawn[0], drawn[1], "stand-in")
