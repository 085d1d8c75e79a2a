# SPDX-License-Identifier: Apache-2.0
"""The kernels against laws whose divergences are known, at the vocabularies of real models.

Every law of ``theory.families`` is solved for a list of KLs, its logits are stored in each dtype
and go through ``token_divergence`` on every instruction set (or another backend). Where the
tolerances come from: docs/validation.md.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trm_ext import _lib, _ops
from trm_ext.outputs import decode, encode

if TYPE_CHECKING:  # a second of imports that the other commands need not wait for
    from theory.divergences import RowDivergences
    from theory.families import GaussianNoise, TokenLaw

__all__ = [
    "BACKENDS",
    "DTYPES",
    "KLS",
    "LAWS",
    "OUTPUTS",
    "VOCABULARIES",
    "Check",
    "Validation",
    "as_dict",
    "validate",
]

_ = _ops  # registers the ops

BACKENDS = ("cpu", "emulator", "cuda")
#: Padded and unpadded vocabularies of SmolLM2, Qwen2.5 (two paddings) and Gemma.
VOCABULARIES = (49_152, 151_936, 152_064, 262_144)
#: Nats of KL(rollout||train) that each law is solved for.
KLS = (1e-9, 1e-6, 1e-3, 0.1, 1.0, 10.0)
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
#: Outputs of ``token_divergence``, and their names in ``theory.divergences``.
OUTPUTS = {
    "kl": "kl_rollout_train",
    "kl_train_rollout": "kl_train_rollout",
    "tv": "tv",
    "chi2": "chi2",
    "bhattacharyya": "squared_hellinger",
    "max_log_ratio": "max_log_ratio",
}
# Relative error that is promised of every output, by whether the arithmetic is float64:
# (128 + 39) 2^-24 and 50 (2^14 + 39) 2^-53, rounded up. See docs/validation.md.
_PROMISE = {False: 1e-5, True: 1e-10}
# Values of a row whose KL is 1e-9 and whose shift is small. An error is relative to the prediction
# or to these, whichever is larger: below them the promise is absolute.
_SMALLEST = {
    "kl": 1e-9,
    "kl_train_rollout": 1e-9,
    "tv": math.sqrt(1e-9 / 2),
    "chi2": 2e-9,
    "bhattacharyya": 2.5e-10,
    "max_log_ratio": math.sqrt(2e-9),
}
# A float64 logit of a law is computed with at most so many roundings.
_ROUNDINGS = 4
# Half-widths in standard deviations: a false alarm has probability 6e-7 per normal output, and
# exp(-10) for the maximum, whose law is Gumbel.
_WIDTH, _WIDTH_OF_MAXIMUM = 5.0, 8.0

_LEAST_KL, _LARGEST_KL = 1e-12, 20.0

Array = NDArray[np.float64]


def _geometric(theory: Any, size: float, vocab: int) -> TokenLaw:
    # 64 nats over the vocabulary: the tail that it cuts off is e^-64.
    ratio = math.exp(-64 / vocab)
    law: TokenLaw = theory.Geometric(ratio, ratio ** (1 + size))
    return law


#: Laws by name: what ``theory.families``, a size in (0, inf) and a vocabulary make of them. The KL
#: grows with the size.
LAWS: dict[str, Callable[[Any, float, int], TokenLaw]] = {
    "one-logit": lambda theory, size, vocab: theory.OneLogitShift(0.3, -size),
    "one-rare-logit": lambda theory, size, vocab: theory.OneLogitShift(1e-4, size),
    "two-level": lambda theory, size, vocab: theory.TwoLevel(0.2, 0.2 * math.exp(-size)),
    "geometric": _geometric,
    "zipf": lambda theory, size, vocab: theory.Zipf(1.0, 1 + size),
    "temperature": lambda theory, size, vocab: theory.Temperature(1 / (1 + size)),
    "gaussian-noise": lambda theory, size, vocab: theory.GaussianNoise(size),
}


@dataclass(frozen=True)
class Check:
    """One output of one row.

    Attributes:
        law: name in :data:`LAWS`.
        detail: the law with its parameters.
        kl: KL(rollout||train) of the law, nats.
        vocab: columns.
        dtype: of the stored logits, both sides.
        instruction_set: what computed it: an instruction set, ``emulator``, or a CUDA device.
        output: field of TokenDivergence.
        law_value: what the law predicts, before its logits are rounded to the dtype.
        prediction: ``law``; ``limit``, the law of a random draw as V goes to infinity; or ``sum``,
            the float64 sum over the rounded logits.
        predicted: the value that the kernel is held to.
        kernel: what it returned.
        error: |kernel - predicted| relative to the prediction, or to the value that a KL of 1e-9
            has where the prediction is smaller.
        tolerance: largest error that passes.
    """

    law: str
    detail: str
    kl: float
    vocab: int
    dtype: str
    instruction_set: str
    output: str
    law_value: float
    prediction: str
    predicted: float
    kernel: float
    error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether the error is within the tolerance; NaN is not."""
        return self.error <= self.tolerance

    @property
    def load(self) -> float:
        """Error over tolerance: the share of the tolerance that is used up."""
        return self.error / self.tolerance if math.isfinite(self.error) else math.inf


@dataclass(frozen=True)
class Validation:
    """Outcome of :func:`validate`.

    Attributes:
        backend: which one ran.
        checks: one per law, KL, vocabulary, dtype, instruction set and output.
    """

    backend: str
    checks: tuple[Check, ...]

    @property
    def failures(self) -> tuple[Check, ...]:
        """The checks that did not pass."""
        return tuple(check for check in self.checks if not check.passed)

    def worst(self, *keys: str) -> dict[tuple[str, ...], Check]:
        """Per combination of the named attributes, the check that uses most of its tolerance."""
        groups: dict[tuple[str, ...], list[Check]] = defaultdict(list)
        for check in self.checks:
            groups[tuple(str(getattr(check, key)) for key in keys)].append(check)
        return {key: max(found, key=lambda check: check.load) for key, found in groups.items()}

    def summary(self) -> dict[tuple[str, str, str], dict[str, Check]]:
        """Per dtype, instruction set and kind of prediction, the worst check of every output."""
        lines: dict[tuple[str, str, str], dict[str, Check]] = defaultdict(dict)
        for key, check in self.worst("dtype", "instruction_set", "prediction", "output").items():
            lines[key[0], key[1], key[2]][key[3]] = check
        return dict(lines)


def validate(
    backend: str = "cpu",
    *,
    laws: Sequence[str] = tuple(LAWS),
    dtypes: Sequence[str] = tuple(DTYPES),
    vocabularies: Sequence[int] = VOCABULARIES,
    kls: Sequence[float] = KLS,
    progress: Callable[[int, int], None] | None = None,
) -> Validation:
    """Hold a backend to laws with known divergences.

    |kernel - predicted| <= tolerance |predicted|, for ``kl``, ``kl_train_rollout``,
    ``tv``, ``chi2``, ``bhattacharyya`` and ``max_log_ratio`` of every row

    In float64 the prediction is the law's closed form, and the tolerance allows for the rounding of
    the logits themselves. ``gaussian-noise`` is a limit V -> inf: its draw is held to it within 5
    standard deviations (8 for the maximum), and to the float64 sum besides; its KL stays below 0.5,
    where the limit is reached. In the other dtypes the prediction is the float64 sum over the
    rounded logits.

    Args:
        backend: ``cpu`` (every instruction set that this machine has), ``emulator`` (the CUDA
            kernels on this CPU, in a clone of the repository), or ``cuda``.
        laws: names in :data:`LAWS`.
        dtypes: names in :data:`DTYPES`, of both sides.
        vocabularies: numbers of columns, at least 200.
        kls: nats that each law is solved for, in [1e-12, 20].
        progress: called with (rows done, rows in all).

    Returns:
        Every check, passed or not.

    Raises:
        ValueError: an unknown name, a vocabulary that is too small, a KL out of range, nothing to
            check, or a backend that is not available, with the reason.

    Numerics:
        Tolerances are derived in docs/validation.md: 1e-5 in float32 arithmetic, 1e-10 in float64.

    Source:
        docs/theory.md#families.

    >>> found = validate(laws=["two-level"], dtypes=["float64"], vocabularies=[1000], kls=[0.1])
    >>> len(found.failures)
    0
    """
    for name, given, known in (("law", laws, LAWS), ("dtype", dtypes, DTYPES)):
        for entry in given:
            if entry not in known:
                raise ValueError(f"unknown {name} {entry!r}; choose from {', '.join(known)}")
    for vocab in vocabularies:
        if vocab < 200:
            raise ValueError(f"a vocabulary must have at least 200 columns, got {vocab}")
    for kl in kls:
        if not _LEAST_KL <= kl <= _LARGEST_KL:
            raise ValueError(f"a KL must be in [{_LEAST_KL:g}, {_LARGEST_KL:g}] nats, got {kl:g}")
    rows = [
        (law, kl, vocab)
        for vocab in vocabularies
        for law in laws
        for kl in kls
        if law != "gaussian-noise" or kl < 0.5
    ]
    if not rows or not dtypes:
        # gaussian-noise alone at a KL of 1, for instance
        raise ValueError("nothing to check: no law, KL, vocabulary or dtype is left")
    with _Runs(backend) as runs:
        checks: list[Check] = []
        for done, (name, kl, vocab) in enumerate(rows):
            checks += _checks_of(name, solve(name, kl, vocab), vocab, dtypes, runs)
            if progress is not None:
                progress(done + 1, len(rows))
    return Validation(backend, tuple(checks))


def as_dict(found: Validation) -> dict[str, Any]:
    """A validation as a JSON-ready dict: ``backend``, ``passed``, ``summary`` and ``rows``.

    Numbers that JSON lacks are the strings "inf" and "nan".
    """
    return {
        "schema_version": 1,
        "backend": found.backend,
        "passed": not found.failures,
        "checks": len(found.checks),
        "failures": len(found.failures),
        "summary": [
            {
                "dtype": dtype,
                "instruction_set": instruction_set,
                "prediction": prediction,
                "worst": {output: _json(check) for output, check in worst.items()},
            }
            for (dtype, instruction_set, prediction), worst in found.summary().items()
        ],
        "rows": [_json(check) for check in found.checks],
    }


def _json(check: Check) -> dict[str, Any]:
    fields = {**check.__dict__, "passed": check.passed}
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in fields.items()
    }


@cache
def solve(name: str, kl: float, vocab: int) -> TokenLaw:
    """A law of a family whose KL is ``kl`` to 1 %: secants on the two logarithms."""
    from theory import families

    def excess(log_size: float) -> float:
        law = LAWS[name](families, math.exp(log_size), vocab)
        return math.log(law.predicted(vocab)["kl_rollout_train"] / kl)

    # Bisection down to a factor of two, then secants: the KL is smooth and grows with the size.
    low, high = -18.0, math.log(200.0)
    while high - low > 0.7:
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) < 0 else (low, middle)
    a, b = (low, excess(low)), (high, excess(high))
    while abs(b[1]) > 0.01:
        size = b[0] - b[1] * (b[0] - a[0]) / (b[1] - a[1])
        a, b = b, (size, excess(size))
    return LAWS[name](families, math.exp(b[0]), vocab)


def _checks_of(
    name: str, law: TokenLaw, vocab: int, dtypes: Sequence[str], runs: _Runs
) -> Iterator[Check]:
    from theory.divergences import logit_divergences
    from theory.families import GaussianNoise

    logits = law.logits(vocab)
    law_values = law.predicted(vocab)
    for dtype in dtypes:
        wide = dtype == "float64"
        rollout, train = (torch.from_numpy(z).to(DTYPES[dtype])[None] for z in logits)
        stored = (rollout[0].double().numpy(), train[0].double().numpy())
        sums = logit_divergences(*stored)
        want = {output: float(getattr(sums, field)) for output, field in OUTPUTS.items()}
        scale = {output: max(want[output], smallest) for output, smallest in _SMALLEST.items()}
        promise = dict.fromkeys(OUTPUTS, _PROMISE[wide])
        held = [("sum", want, promise)]
        if wide:
            by_law = {output: law_values[field] for output, field in OUTPUTS.items()}
            if isinstance(law, GaussianNoise):
                held.append(("limit", by_law, _over(_sampling_error(law, vocab), scale)))
            else:
                moved = _over(_logit_rounding(*stored, sums), scale)
                allowed = {output: promise[output] + moved[output] for output in OUTPUTS}
                held = [("law", by_law, allowed)]
        for instruction_set, kernel in runs(rollout, train):
            for prediction, predicted, allowed in held:
                for output, want_here in predicted.items():
                    yield Check(
                        law=name,
                        detail=str(law),
                        kl=law_values["kl_rollout_train"],
                        vocab=vocab,
                        dtype=dtype,
                        instruction_set=instruction_set,
                        output=output,
                        law_value=law_values[OUTPUTS[output]],
                        prediction=prediction,
                        predicted=want_here,
                        kernel=kernel[output],
                        error=abs(kernel[output] - want_here) / scale[output],
                        tolerance=allowed[output],
                    )


def _over(values: dict[str, float], scale: dict[str, float]) -> dict[str, float]:
    return {output: value / scale[output] for output, value in values.items()}


def _sampling_error(law: GaussianNoise, vocab: int) -> dict[str, float]:
    sd = law.sampling_sd(vocab)
    return {
        output: (_WIDTH_OF_MAXIMUM if output == "max_log_ratio" else _WIDTH) * sd[field]
        for output, field in OUTPUTS.items()
    }


def _logit_rounding(x: Array, y: Array, sums: RowDivergences) -> dict[str, float]:
    """How far the roundings of the logits move each output: sum |derivative| * rounding.

    d kl / dx = p (log(p/q) - kl), d kl / dy = q - p, and so on; first order.
    """
    eps = _ROUNDINGS * 2.0**-53
    dx, dy = eps * np.abs(x), eps * np.abs(y)
    p, q = (np.exp(z - np.logaddexp.reduce(z)) for z in (x, y))
    r = (y - x) - (np.logaddexp.reduce(y) - np.logaddexp.reduce(x))
    root, square = np.sqrt(p * q), q * np.exp(r)
    kl, reverse = float(sums.kl_rollout_train), float(sums.kl_train_rollout)
    moves = np.abs(q - p)
    # log(q_v/p_v) moves by its own two roundings and by those of the normalisers.
    common = float(p @ dx + q @ dy)
    return {
        "kl": float((p * np.abs(r + kl)) @ dx + moves @ dy),
        "kl_train_rollout": float((q * np.abs(r - reverse)) @ dy + moves @ dx),
        "tv": float(p @ dx + q @ dy),
        "chi2": float(
            np.abs(square - (1 + float(sums.chi2)) * p) @ dx
            + 2 * np.abs(square - (1 + float(sums.chi2)) * q) @ dy
        ),
        "bhattacharyya": float(
            np.abs(root - float(sums.bc) * p) @ dx / 2 + np.abs(root - float(sums.bc) * q) @ dy / 2
        ),
        "max_log_ratio": float(dx[r.argmax()] + dy[r.argmax()]) + common,
    }


class _Runs:
    """The ways in which a backend computes a row, each with its name."""

    def __init__(self, backend: str) -> None:
        if backend not in BACKENDS:
            raise ValueError(f"unknown backend {backend!r}; choose from {', '.join(BACKENDS)}")
        self.backend = backend
        self.bits = encode(tuple(OUTPUTS))
        self.selected = _lib.cpu_capability()
        if backend == "emulator":
            self.emulator = _emulator()
        if backend == "cuda" and (reason := _lib.describe()["cuda"]["reason"]) is not None:
            raise ValueError(f"backend cuda: {reason}")

    def __enter__(self) -> _Runs:
        return self

    def __exit__(self, *_: object) -> None:
        _lib.force_cpu_capability(self.selected)

    def __call__(self, rollout: Tensor, train: Tensor) -> Iterator[tuple[str, dict[str, float]]]:
        """What each of them makes of one row of logits."""
        if self.backend == "cpu":
            for name in _lib.available_cpu_capabilities():
                _lib.force_cpu_capability(name)
                yield name, self._values(torch.ops.trm.token_divergence, rollout, train)
        elif self.backend == "cuda":
            name = torch.cuda.get_device_name()
            yield name, self._values(torch.ops.trm.token_divergence, rollout.cuda(), train.cuda())
        else:
            yield "emulator", self._values(self.emulator.token_divergence, rollout, train)

    def _values(self, op: Callable[..., Any], rollout: Tensor, train: Tensor) -> dict[str, float]:
        values, diagnostics, _statistics = op(
            rollout, train, None, None, None, None, rollout.shape[-1], self.bits
        )
        found = torch.cat([values.double(), diagnostics.double()])[:, 0].tolist()
        return dict(zip(decode(self.bits), found, strict=True))


def _emulator() -> Any:
    """The CUDA kernels as a Python module on this CPU: built from a clone, never installed."""
    file = Path(__file__).resolve().parent.parent / "tests" / "emulator_build.py"
    if not file.is_file():
        raise ValueError(
            "backend emulator: it is built from the repository's csrc and tests, which are not "
            "part of an installed package; run it in a clone"
        )
    name = "tests.emulator_build"  # the tests' own name for it: the library can be loaded only once
    builder = sys.modules.get(name)
    if builder is None:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        builder = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(builder)
        except ModuleNotFoundError as missing:
            del sys.modules[name]
            raise ValueError(f"backend emulator: {missing.name} is not installed") from None
    if (reason := builder.why_not()) is not None:
        raise ValueError(f"backend emulator: {reason}")
    return builder.module()
