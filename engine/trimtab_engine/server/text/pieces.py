"""The bytes that each token stands for, read from the decoder section of a tokenizer.json.

`Tokenizer` builds one `PieceTable`; the detokeniser and the logprobs read it. Knowing bytes rather than strings is what
lets a stream hold back exactly the unfinished UTF-8 character and lets logprobs carry OpenAI's `bytes` field. Covers the
decoders of the model families that the engine runs: byte-level BPE (Llama 3, Qwen, SmolLM2, Mistral Tekken) and
SentencePiece with byte fallback (Llama 2, Mistral). Knows nothing of streams, requests or models.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trimtab_engine.errors import ModelLoadError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's table of printable stand-ins for the 256 bytes, inverted: character → byte."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_LEVEL = _byte_level_alphabet()


def _byte_level(token: str) -> bytes:
    # As in the tokenizers library: a token with any character outside the alphabet (an added token) stands for itself.
    try:
        return bytes([_BYTE_LEVEL[character] for character in token])
    except KeyError:
        return token.encode()


def _steps(decoder: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    if decoder.get("type") == "Sequence":
        return [step for part in decoder["decoders"] for step in _steps(part)]
    return [decoder]


def token_to_bytes(decoder: Mapping[str, Any] | None) -> Callable[[str], bytes]:
    """The function token string → bytes in the middle of a text, for the `decoder` object of a tokenizer.json.

    What decoders do at the start of a text only (strip one space) is left out: outputs always follow a prompt.
    Raises ModelLoadError for a decoder whose tokens have no fixed bytes (WordPiece, CTC).
    """
    if decoder is None:  # the tokenizers library then joins tokens by spaces
        return lambda token: b" " + token.encode()
    steps = _steps(decoder)
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level
    replacements: list[tuple[str, str]] = []
    byte_fallback = False
    for step, kind in zip(steps, kinds, strict=True):
        if kind == "Replace" and isinstance(step["pattern"].get("String"), str):
            replacements.append((step["pattern"]["String"], step["content"]))
        elif kind == "Metaspace":
            replacements.append((step["replacement"], " "))
        elif kind == "ByteFallback":
            byte_fallback = True
        elif kind not in ("Fuse", "Strip"):
            raise ModelLoadError(
                f"tokenizer.json: decoder {kind!r} is not supported; "
                "supported are ByteLevel, and Sequence of Replace, Metaspace, ByteFallback, Fuse, Strip"
            )

    def convert(token: str) -> bytes:
        if byte_fallback and (match := _BYTE_TOKEN.match(token)):
            return bytes([int(match[1], 16)])
        for pattern, content in replacements:
            token = token.replace(pattern, content)
        return token.encode()

    return convert


class PieceTable:
    """Token id → bytes, computed on first use. Ids without a token (padding of the embedding) stand for nothing."""

    def __init__(
        self,
        id_to_token: Callable[[int], str | None],
        decoder: Mapping[str, Any] | None,
        special_ids: frozenset[int],
    ) -> None:
        self._id_to_token = id_to_token
        self._convert = token_to_bytes(decoder)
        self._pieces: dict[int, bytes] = {}
        self.special_ids = special_ids

    def __getitem__(self, token_id: int) -> bytes:
        piece = self._pieces.get(token_id)
        if piece is None:
            token = self._id_to_token(token_id)
            piece = b"" if token is None else self._convert(token)
            self._pieces[token_id] = piece
        return piece

    def visible(self, token_id: int, skip_special_tokens: bool) -> bytes:
        """Like indexing, but empty for special tokens when those are skipped."""
        return b"" if skip_special_tokens and token_id in self.special_ids else self[token_id]
