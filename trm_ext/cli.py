# SPDX-License-Identifier: Apache-2.0
"""The command ``trm``: results on stdout, progress and errors on stderr."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

OK, FAILED, BAD_INPUT, INTERRUPTED, TERMINATED, BROKEN_PIPE = 0, 1, 2, 130, 143, 141

_EXIT_CODES = """\
exit codes:
  0    done (whether sequences are kept or masked does not matter)
  1    unexpected error; run again with --verbose for the traceback; or a check that failed
  2    bad input or usage: the message on stderr names the offending value
  130  interrupted (Ctrl-C); nothing half-written is left behind
  143  terminated (SIGTERM); nothing half-written is left behind
"""


class _Parser(argparse.ArgumentParser):
    """argparse with one-sentence errors."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments without the program's name; None takes ``sys.argv``.

    Returns:
        The exit code, as listed by ``trm --help``.
    """
    try:
        arguments = _parser().parse_args(argv)
        arguments.command = shlex.join(["trm", *(sys.argv[1:] if argv is None else argv)])
    except SystemExit as stop:  # argparse has printed its sentence, or the help
        return int(stop.code or 0)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminate)
    try:
        code: int | None = arguments.run(arguments)
        sys.stdout.flush()
        return OK if code is None else code
    except KeyboardInterrupt:
        return _fail(arguments, "interrupted", INTERRUPTED)
    except _Terminated:
        return _fail(arguments, "terminated", TERMINATED)
    except BrokenPipeError:  # the reader of stdout is gone, as in `trm audit ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception as error:
        from trm_ext.engines import EngineError

        expected = isinstance(error, (ValueError, OSError, EngineError))
        text = str(error) if expected else f"{type(error).__name__}: {error}"
        return _fail(arguments, f"error: {text}", BAD_INPUT if expected else FAILED)


def _info(arguments: argparse.Namespace) -> None:
    from trm_ext import _lib
    from trm_ext.report.table import print_tree

    facts = _lib.describe()
    if arguments.format == "json":
        _print_json(facts)
    else:
        print_tree(facts, sys.stdout)


def _audit(arguments: argparse.Namespace) -> None:
    from trm_ext.audit import as_dict, audit_file, write_results
    from trm_ext.report.table import print_audit

    text = _token_text(arguments)
    with _bar(arguments, "audit", "tokens") as progress:
        audit = audit_file(
            arguments.file,
            arguments.max_kl,
            chunk_rows=arguments.chunk_rows,
            progress=progress,
        )
    if arguments.out is not None:
        write_results(audit, arguments.out)
    if arguments.html is not None:
        from trm_ext.report.audit_page import audit_page
        from trm_ext.report.page import write_page

        write_page(arguments.html, audit_page(audit, text=text, command=arguments.command))
    if arguments.format == "json":
        _print_json(as_dict(audit))
    else:
        print_audit(audit, sys.stdout)
        _print_written(arguments)


def _certify(arguments: argparse.Namespace) -> None:
    from trm_ext.audit import write_folder, write_json
    from trm_ext.certification import GateConstants, as_dict, certify_file
    from trm_ext.report.certificate import print_certification
    from trm_ext.token_statistics import write_statistics

    text = _token_text(arguments)
    given = {
        name: value
        for name in GateConstants.__dataclass_fields__
        if (value := getattr(arguments, name)) is not None
    }
    if given and arguments.split:
        raise ValueError("--split chooses the constants: give it or them, not both")
    with _bar(arguments, "certify", "tokens") as progress:
        result = certify_file(
            arguments.file,
            held_out=arguments.held_out,
            reward_range=tuple(arguments.reward_range),
            alpha=arguments.alpha,
            horizon=arguments.horizon,
            constants="split" if arguments.split else GateConstants(**given),
            primary=arguments.primary,
            chunk_rows=arguments.chunk_rows,
            progress=progress,
        )
    document = as_dict(result)
    if arguments.out is not None:
        write_folder(
            arguments.out,
            {
                "certificate.json": lambda path: write_json(path, document),
                "statistics.safetensors": lambda path: write_statistics(path, result.statistics),
            },
        )
    if arguments.html is not None:
        from trm_ext.report.certify_page import certify_page
        from trm_ext.report.page import write_page

        write_page(arguments.html, certify_page(result, text=text, command=arguments.command))
    if arguments.format == "json":
        _print_json(document)
    else:
        print_certification(result, sys.stdout)
        _print_written(arguments)


def _calibrate(arguments: argparse.Namespace) -> None:
    from trm_ext.audit import write_folder, write_json
    from trm_ext.calibration import as_dict, calibrate
    from trm_ext.report.calibration import print_calibration

    _check_page(arguments)
    with _bar(arguments, "calibrate", "tokens") as progress:
        result = calibrate(
            arguments.files,
            thresholds=arguments.max_kl,
            target_acceptance=arguments.acceptance,
            horizon=arguments.horizon,
            alpha=arguments.alpha,
            chunk_rows=arguments.chunk_rows,
            progress=progress,
        )
    document = as_dict(result)
    if arguments.out is not None:
        write_folder(arguments.out, {"calibration.json": lambda path: write_json(path, document)})
    if arguments.html is not None:
        from trm_ext.report.calibrate_page import calibrate_page
        from trm_ext.report.page import write_page

        write_page(arguments.html, calibrate_page(result, command=arguments.command))
    if arguments.format == "json":
        _print_json(document)
    else:
        print_calibration(result, sys.stdout)
        _print_written(arguments)


def _record(arguments: argparse.Namespace) -> None:
    from trm_ext.record import PROMPTS, record

    if arguments.prompt_file is not None:
        lines = arguments.prompt_file.read_text(encoding="utf-8").splitlines()
        prompts = tuple(line for line in lines if line.strip())
    else:
        prompts = PROMPTS[: arguments.prompts or 4]
    with _bar(arguments, f"record {arguments.engine}", "sequences") as progress:
        done = record(
            arguments.engine,
            arguments.out,
            pair=arguments.pair,
            prompts=prompts,
            samples=arguments.samples,
            max_new_tokens=arguments.max_new_tokens,
            temperature=arguments.temperature,
            seed=arguments.seed,
            announce=_announce,
            progress=progress,
        )
    print(f"{done.sequences} sequences, {done.tokens} tokens, written to {done.path.resolve()}")


def _demo(arguments: argparse.Namespace) -> None:
    from trm_ext.demo import print_demo, run_demo
    from trm_ext.pairs import print_pairs, run_pairs

    if arguments.pairs:
        with _bar(arguments, "pairs", "sequences") as progress:
            pairs = run_pairs(
                arguments.out / "pairs",
                prompts=arguments.prompts or 8,
                samples=arguments.samples,
                max_new_tokens=arguments.max_new_tokens,
                seed=arguments.seed,
                announce=_announce,
                progress=progress,
            )
        print_pairs(pairs, sys.stdout)
        return
    with _bar(arguments, "demo", "sequences") as progress:
        demo = run_demo(
            arguments.out,
            prompts=arguments.prompts or 4,
            max_new_tokens=arguments.max_new_tokens,
            max_kl=arguments.max_kl,
            seed=arguments.seed,
            announce=_announce,
            progress=progress,
        )
    print_demo(demo, sys.stdout)


def _validate(arguments: argparse.Namespace) -> int:
    from trm_ext.report.table import print_validation
    from trm_ext.validate import as_dict, validate

    with _bar(arguments, "validate", "rows") as progress:
        found = validate(
            arguments.backend,
            laws=arguments.laws,
            dtypes=arguments.dtypes,
            vocabularies=arguments.vocab,
            kls=arguments.kl,
            progress=progress,
        )
    if arguments.format == "json":
        _print_json(as_dict(found))
    else:
        print_validation(found, arguments.rows, sys.stdout)
    return FAILED if found.failures else OK


def _parser() -> argparse.ArgumentParser:
    from trm_ext.engines import names
    from trm_ext.validate import BACKENDS, DTYPES, KLS, LAWS, VOCABULARIES

    common = _Parser(add_help=False)
    common.add_argument("--verbose", action="store_true", help="print tracebacks")
    bar = _Parser(add_help=False)
    bar.add_argument(
        "--progress",
        action="store_true",
        help="draw the progress bar even when stderr is not a terminal",
    )
    parser = _Parser(
        prog="trm",
        description="Exact vocabulary-level KL between a rollout policy and a train policy, and\n"
        "the sequences that a trust region masks.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"trm {_version()}")
    verbs = parser.add_subparsers(metavar="VERB", required=True, parser_class=_Parser)

    def verb(name: str, run: Any, text: str, detail: str, *parents: Any) -> argparse.ArgumentParser:
        made = verbs.add_parser(
            name,
            help=text,
            description=detail,
            epilog=_EXIT_CODES,
            parents=[common, *parents],
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        made.set_defaults(run=run)
        return made

    info = verb(
        "info",
        _info,
        "versions, backends, and why a backend is absent",
        "Print versions, the backends that are loaded, what the binaries contain, and for each\n"
        "absent backend the reason.",
    )
    _add_format(info)

    audit = verb(
        "audit",
        _audit,
        "exact KL of a rollout-pair file, and which sequences a threshold masks",
        "Read a rollout-pair file and compute KL(rollout || train) of every token over the whole\n"
        "vocabulary, in bounded memory. Prints one row per sequence and a summary. A sequence is\n"
        "kept iff its largest KL is at most the threshold; NaN or +inf masks it.",
        bar,
    )
    audit.add_argument("file", type=Path, metavar="FILE", help="rollout-pair file (.safetensors)")
    audit.add_argument(
        "--max-kl",
        type=_threshold,
        required=True,
        metavar="NATS",
        help="threshold on the largest KL of a sequence",
    )
    _add_format(audit)
    audit.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="also write audit.json and tokens.csv (one line per token) there, all or nothing",
    )
    _add_html(audit)
    _add_tokenizer(audit)
    _add_chunk_rows(audit)

    certify = verb(
        "certify",
        _certify,
        "does the update improve the expected reward? a certificate from rollouts",
        "Read a rollout-pair file with rewards (or the statistics that --out wrote) and print\n"
        "lower limits of J(train) - J(rollout), finite-sample and asymptotic, with one verdict:\n"
        "CERTIFIED, HARMFUL, VACUOUS or NOT_CERTIFIED. The constants must be chosen before the\n"
        "rollouts are looked at, or with --split.",
        bar,
    )
    certify.add_argument("file", type=Path, metavar="FILE", help="file with rewards")
    certify.add_argument(
        "--held-out",
        action="store_true",
        help="state that the rollouts were drawn after the train policy was fixed; without it "
        "the result is labelled optimistic and never CERTIFIED",
    )
    certify.add_argument(
        "--reward-range",
        type=float,
        nargs=2,
        default=(0.0, 1.0),
        metavar=("LOW", "HIGH"),
        help="declared range of the rewards (default: 0 1)",
    )
    certify.add_argument(
        "--alpha",
        type=float,
        default=0.05,
        metavar="P",
        help="failure probability of each one-sided statement (default: %(default)s)",
    )
    certify.add_argument(
        "--horizon", type=_positive, metavar="T", help="largest possible length, if it is known"
    )
    certify.add_argument(
        "--primary",
        choices=("truncated_weight", "sequence_mask", "frozen_budget", "frozen_drift"),
        default="truncated_weight",
        help="the certificate that decides: C0, C2, or C3' with the budget gate or with the drift "
        "gate (default: %(default)s); choose it before looking at the rollouts",
    )
    certify.add_argument(
        "--split",
        action="store_true",
        help="choose the constants on every fourth rollout and certify on the others",
    )
    for option, meaning in (
        ("max-kl", "nats: a token above it closes both gates and masks its sequence"),
        ("max-ratio", "the gates count ratios as min(rho, this)"),
        ("shift-budget", "the budget gate closes when sum |rho - 1| exceeds it"),
        ("drift-budget", "the drift gate closes when |sum (rho - 1)| exceeds it"),
        ("kl-budget", "nats: both gates close when the sum of KL exceeds it"),
        ("max-abs-log-weight", "W counts as at most 1 + this; C2 masks |log W| above it"),
    ):
        certify.add_argument(f"--{option}", type=float, metavar="X", help=meaning)
    _add_format(certify)
    certify.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="also write certificate.json and statistics.safetensors there, all or nothing",
    )
    _add_html(certify)
    _add_tokenizer(certify)
    _add_chunk_rows(certify)

    calibrate = verb(
        "calibrate",
        _calibrate,
        "noise floor of an engine pair, and what each threshold keeps and can say",
        "Read one or more rollout-pair files (or statistics). Files recorded with\n"
        "trm record --pair noise-floor give the floor, the others the acceptance by threshold and\n"
        "length. Two files with the same tokens (two machines, two kernels) are compared token by\n"
        "token. Warns when a threshold lies below the floor.",
        bar,
    )
    calibrate.add_argument("files", type=Path, nargs="+", metavar="FILE", help="files to read")
    calibrate.add_argument(
        "--max-kl",
        type=_threshold,
        action="append",
        default=[],
        metavar="NATS",
        help="a threshold to judge, in addition to a grid; may be repeated",
    )
    calibrate.add_argument(
        "--acceptance",
        type=float,
        default=0.9,
        metavar="P",
        help="share of sequences to keep (default: %(default)s)",
    )
    calibrate.add_argument(
        "--horizon", type=_positive, metavar="T", help="largest possible length, if it is known"
    )
    calibrate.add_argument(
        "--alpha",
        type=float,
        default=0.05,
        metavar="P",
        help="failure probability of upper limits (default: %(default)s)",
    )
    _add_format(calibrate)
    calibrate.add_argument(
        "--out", type=Path, metavar="DIR", help="also write calibration.json there"
    )
    _add_html(calibrate)
    _add_chunk_rows(calibrate)

    record = verb(
        "record",
        _record,
        "sample from an engine and write a rollout-pair file",
        "Let an engine sample from SmolLM2-135M, score the same tokens in torch float32 (or in\n"
        "the same engine, which shows its noise floor), and write both sides' full logits and a\n"
        "reward, the share of distinct words. The first run converts the model and keeps it\n"
        "under $TRM_CACHE (default: the user's cache folder).",
        bar,
    )
    record.add_argument(
        "--engine", required=True, metavar="NAME", help=f"one of: {', '.join(names())}"
    )
    record.add_argument("--out", type=Path, required=True, metavar="FILE", help="file to write")
    record.add_argument(
        "--pair",
        choices=("train", "noise-floor"),
        default="train",
        help="who scores the sampled tokens: torch float32, or the same engine in one pass "
        "(default: %(default)s)",
    )
    _add_sampling(record)
    record.add_argument(
        "--prompt-file",
        type=Path,
        metavar="FILE",
        help="prompts, one per line, instead of the built-in ones",
    )
    record.add_argument(
        "--temperature",
        type=float,
        default=1.0,
        metavar="T",
        help="sampling temperature (default: %(default)s)",
    )

    demo = verb(
        "demo",
        _demo,
        "the whole walk on a real model: two engines, one table",
        "Record and audit SmolLM2-135M on two engines, one badly off (CTranslate2 int8) and one\n"
        "nearly exact (CTranslate2 float32), against torch float32. Ends with one table: the\n"
        "exact KL, and beside it what the sampled token alone would have said. With --pairs:\n"
        "three engines and two stale policies, and what each pair can certify.",
        bar,
    )
    demo.add_argument(
        "--pairs",
        action="store_true",
        help="the table of five pairs of policies with certificates, some minutes",
    )
    demo.add_argument(
        "--out",
        type=Path,
        default=Path("out/demo"),
        metavar="DIR",
        help="folder to write to (default: %(default)s)",
    )
    _add_sampling(demo)
    demo.add_argument(
        "--max-kl",
        type=_threshold,
        default=0.02,
        metavar="NATS",
        help="threshold (default: %(default)s, twice the KL that bfloat16 rounding alone causes)",
    )

    validate = verb(
        "validate",
        _validate,
        "the kernels against laws whose divergences are known",
        "Hold the kernels to laws with known divergences at the vocabularies of real models:\n"
        "every dtype on every instruction set, KL from 1e-9 to 10 nats, all divergences. In\n"
        "float64 the prediction is the law's closed form, elsewhere the float64 sum of the\n"
        "rounded logits. Tolerances are derived in docs/validation.md. Exit code 1 when a check\n"
        "fails.",
        bar,
    )
    validate.add_argument(
        "--backend",
        choices=BACKENDS,
        default="cpu",
        help="cpu runs every instruction set that this machine has; emulator runs the CUDA kernels"
        " on this CPU, in a clone of the repository (default: %(default)s)",
    )
    _add_format(validate)
    validate.add_argument(
        "--rows",
        choices=("worst", "failed", "all"),
        default="worst",
        help="of the table: per law, dtype and instruction set the check that uses most of its "
        "tolerance, those that failed, or every one (default: %(default)s)",
    )
    for option, known, word in (("--laws", LAWS, "LAW"), ("--dtypes", DTYPES, "DTYPE")):
        validate.add_argument(
            option,
            nargs="+",
            choices=tuple(known),
            default=tuple(known),
            metavar=word,
            help=f"some of {', '.join(known)} (default: all)",
        )
    validate.add_argument(
        "--vocab",
        nargs="+",
        type=_positive,
        default=VOCABULARIES,
        metavar="V",
        help=f"vocabularies, at least 200 (default: {' '.join(map(str, VOCABULARIES))})",
    )
    validate.add_argument(
        "--kl",
        nargs="+",
        type=_threshold,
        default=KLS,
        metavar="NATS",
        help=f"KLs that each law is solved for (default: {' '.join(f'{kl:g}' for kl in KLS)})",
    )
    return parser


def _add_html(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="also write one self-contained HTML page (no script, nothing fetched)",
    )


def _add_tokenizer(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="PATH",
        help="tokenizer.json, or its folder: the page shows tokens as text",
    )


def _add_format(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--format",
        choices=("table", "json"),
        default="table",
        help="of what is printed (default: %(default)s)",
    )


def _add_chunk_rows(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--chunk-rows",
        type=_positive,
        metavar="N",
        help="tokens in memory at a time (default: about 32 MiB of logits per side)",
    )


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompts",
        type=_prompt_count,
        metavar="N",
        help="how many of the 8 built-in prompts (default: 4; 8 with --pairs)",
    )
    parser.add_argument(
        "--samples",
        type=_positive,
        default=1,
        metavar="N",
        help="sequences per prompt (default: %(default)s)",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=_positive,
        default=64,
        metavar="N",
        help="at most this many tokens per sequence (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the sampler (default: %(default)s)"
    )


def _threshold(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"expected a number >= 0, got {text!r}")
    return value


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number >= 1, got {text!r}")
    return int(text)


def _prompt_count(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 8:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 to 8, got {text!r}")
    return int(text)


def _bar(arguments: argparse.Namespace, label: str, unit: str) -> Any:
    from trm_ext.report.progress import ProgressBar

    enabled = arguments.progress or sys.stderr.isatty()
    return ProgressBar(label, unit, sys.stderr, enabled)


def _check_page(arguments: argparse.Namespace) -> None:
    """Refuse a page that cannot be written before any long work."""
    if arguments.html is not None:
        from trm_ext.report.page import check_target

        check_target(arguments.html)


def _token_text(arguments: argparse.Namespace) -> Any:
    """Check what was asked of the page before any long work; return the tokenizer, or None."""
    _check_page(arguments)
    if arguments.tokenizer is None:
        return None
    if arguments.html is None:
        raise ValueError("--tokenizer is for the page: add --html FILE")
    from trm_ext.report.token_text import load_tokenizer

    return load_tokenizer(arguments.tokenizer)


def _print_written(arguments: argparse.Namespace) -> None:
    for path in (arguments.out, arguments.html):
        if path is not None:
            print(f"written to {path.resolve()}")


def _announce(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _print_json(document: Any) -> None:
    print(json.dumps(document, indent=2, allow_nan=False))


def _fail(arguments: argparse.Namespace, message: str, code: int) -> int:
    if arguments.verbose:
        traceback.print_exc()
    print(f"trm: {message}", file=sys.stderr)
    return code


class _Terminated(BaseException):
    """SIGTERM, as an exception, so that every clean-up runs."""


def _terminate(number: int, frame: object) -> None:
    raise _Terminated


def _version() -> str:
    try:
        return version("trm-ext")
    except PackageNotFoundError:
        return "0+unknown"
