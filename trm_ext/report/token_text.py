# SPDX-License-Identifier: Apache-2.0
"""Token ids as text that a reader can see, with a tokenizer when there is one."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

from trm_ext.report.page import Html, element, join

__all__ = ["TokenText", "load_tokenizer", "visible"]

#: From a token's id to its text.
TokenText = Callable[[int], str]

_BEFORE, _AFTER = 8, 4


def load_tokenizer(path: Path) -> TokenText:
    """Read a tokenizer from local files; nothing is downloaded.

    Args:
        path: a ``tokenizer.json``, or a folder that holds one or that ``transformers`` can read.

    Returns:
        A function from token id to text. An id that the tokenizer does not know becomes ``#id``.

    Raises:
        ValueError: the path does not exist or cannot be read as a tokenizer, or the package that
            reads it is not installed.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    if not path.exists():
        raise ValueError(f"{path}: no such tokenizer")
    if file.is_file():
        if importlib.util.find_spec("tokenizers") is None:
            raise ValueError("reading a tokenizer needs a package: pip install tokenizers")
        from tokenizers import Tokenizer

        try:
            decode = Tokenizer.from_file(str(file)).decode
        except Exception as error:
            raise ValueError(f"{file}: not a tokenizer ({error})") from None
        return lambda token: decode([token], skip_special_tokens=False) or f"#{token}"
    if importlib.util.find_spec("transformers") is None:
        raise ValueError(f"{path}: holds no tokenizer.json; reading it needs transformers")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{path}: not a tokenizer ({reason})") from None
    return lambda token: tokenizer.decode([token]) or f"#{token}"


def visible(text: str) -> str:
    r"""Show spaces at the ends and line ends, which would otherwise vanish.

    >>> visible(" the\n")
    '␣the⏎'
    """
    text = text.replace("\r", "␍").replace("\n", "⏎").replace("\t", "⇥")
    stripped = text.lstrip(" ")
    text = "␣" * (len(text) - len(stripped)) + stripped
    stripped = text.rstrip(" ")
    return stripped + "␣" * (len(text) - len(stripped))


def in_context(tokens: list[int], position: int, text: TokenText | None) -> Html:
    """The token at ``position`` marked, between some of its neighbours; its id without a text."""
    if text is None:
        return element("code", f"#{tokens[position]}")
    first = max(position - _BEFORE, 0)
    before = "".join(map(text, tokens[first:position])).replace("\n", "⏎")
    after = "".join(map(text, tokens[position + 1 : position + 1 + _AFTER])).replace("\n", "⏎")
    return element(
        "code",
        join(["…" if first else "", before]),
        element("mark", visible(text(tokens[position]))),
        join([after, "…" if position + 1 + _AFTER < len(tokens) else ""]),
    )
