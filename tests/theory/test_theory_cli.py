# SPDX-License-Identifier: Apache-2.0
import csv
import io
import json
import subprocess
import sys

import pytest

from theory.cli import main

KEYS = ["name", "value", "rigorous", "needs", "source"]


def run(capsys, *arguments):
    code = main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_bounds_json_has_stable_keys_and_the_headline_numbers(capsys):
    code, out, _ = run(
        capsys,
        "bounds",
        "--horizon",
        "4096",
        "--max-kl",
        "1e-4",
        "--seq-kl",
        "0.01",
        "--format",
        "json",
    )
    found = json.loads(out)
    assert code == 0
    assert all(list(row)[:5] == KEYS for row in found["rows"])
    value = {row["name"]: row["value"] for row in found["rows"]}
    assert value["classical_kl"] == pytest.approx(1677.31, abs=5e-3)
    assert value["pinsker_marginal_kl"] == pytest.approx(34.946, abs=5e-4)
    assert value["half_pinsker_marginal_kl"] == pytest.approx(17.473, abs=5e-4)
    assert value["mixed_kl"] == pytest.approx(8.192, abs=5e-4)
    assert value["coupling"] == pytest.approx(113.84, abs=5e-3)
    assert value["seq_kl"] == value["unified"] == 0.01
    needs = {row["name"]: row["needs"] for row in found["rows"]}
    assert needs["mixed_kl"] == {"max_kl": "maximum over all contexts", "seq_kl": "rollout average"}


def test_bounds_table_csv_and_reward_range(capsys):
    _, out, _ = run(capsys, "bounds", "--horizon", "8", "--max-kl", "0.01", "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert {*KEYS} <= {*rows[0]}
    one = float(next(r["value"] for r in rows if r["name"] == "classical_kl"))
    assert one == pytest.approx(0.56)
    _, out, _ = run(
        capsys,
        "bounds",
        "--horizon",
        "8",
        "--max-kl",
        "0.01",
        "--reward-range",
        "-1",
        "1",
        "--format",
        "csv",
    )
    rows = list(csv.DictReader(io.StringIO(out)))
    assert float(next(r["value"] for r in rows if r["name"] == "classical_kl")) == pytest.approx(
        1.12
    )
    _, out, _ = run(capsys, "bounds", "--horizon", "8", "--max-kl", "0.01", "--max-tv", "0.05")
    assert "seq_kl_from_max" in out and "can certify improvement" in out


def test_invert(capsys):
    code, out, _ = run(
        capsys,
        "invert",
        "--horizon",
        "4096",
        "--target",
        "0.5",
        "--max-kl",
        "1e-4",
        "--seq-kl",
        "0.01",
        "--format",
        "json",
    )
    rows = {r["name"]: r for r in json.loads(out)["rows"]}
    assert code == 0
    assert rows["classical_kl"]["largest"] == pytest.approx(0.5 / (4096 * 4095), rel=1e-9)
    assert rows["classical_kl"]["vacuous_from"] == 72  # 72 * 71 * 1e-4 = 0.511
    assert rows["seq_kl_from_max"]["vacuous_from"] == 5000
    assert rows["seq_kl"]["largest"] == 0.5
    assert rows["seq_kl"]["vacuous_from"] == "never"
    assert rows["mixed_kl"]["vacuous_from"] == 250  # 2 T sqrt(1e-6) = 0.5


@pytest.mark.parametrize(
    "family",
    [
        "tree",
        "markov",
        "product",
        "rare-token",
        "hazard",
        "two-step",
        "reverse-branch",
        "routing-flip",
        "amplification",
        "search",
    ],
)
def test_mdp_families_hold_every_bound(capsys, family):
    extra = ["--length", "3"] if family == "search" else []
    if family in ("markov", "product", "hazard"):
        extra = ["--length", "64"]
    code, out, _ = run(capsys, "mdp", family, "--format", "json", *extra)
    found = json.loads(out)
    assert code == 0 and found["family"] == family
    assert found["rows"]
    assert all(list(row)[:2] == ["name", "value"] for row in found["rows"])
    assert all(row["truth/bound"] <= 1 + 1e-9 for row in found["rows"])


def test_mdp_options_reach_the_tree(capsys):
    _, out, _ = run(
        capsys,
        "mdp",
        "tree",
        "--outside",
        "0.4",
        "--vocab",
        "4",
        "--length",
        "3",
        "--eos",
        "--prompts",
        "2",
        "--zero",
        "0.1",
        "--format",
        "json",
    )
    found = json.loads(out)
    assert found["outside_mass"] > 0 and found["sequences"] == 128
    _, out, _ = run(capsys, "mdp", "reverse-branch", "--length", "4", "--format", "json")
    assert json.loads(out)["sup |Error| over it"] > 0.99 * 3


def test_gradients_and_tables(capsys):
    code, out, _ = run(capsys, "gradients", "--length", "3", "--format", "json")
    found = json.loads(out)
    assert code == 0
    bias = {r["estimator"]: r["bias against grad J"] for r in found["rows"]}
    assert bias["seq_is"] < 1e-12 < bias["token_is"]
    assert found["exponent of Token-IS bias (rare token)"] == pytest.approx(2, abs=0.01)
    code, out, _ = run(capsys, "tables")
    assert code == 0 and "paper-bounds" in out and "1610.24" in out
    _, out, _ = run(capsys, "tables", "blog-growth", "--format", "json")
    assert [t["name"] for t in json.loads(out)] == ["blog-growth"]
    _, out, _ = run(capsys, "tables", "paper-acceptance", "--format", "csv")
    assert out.startswith("table,quantity,theirs,ours,agrees,note")


def test_selfcheck_and_its_exit_code(capsys, monkeypatch):
    code, out, _ = run(capsys, "selfcheck", "--trees", "5")
    assert code == 0 and "seq_kl" in out and "violations: 0" in out
    from theory import exact

    monkeypatch.setattr(exact, "sup_error", lambda tree: 1e9)
    code, _, err = run(capsys, "selfcheck", "--trees", "1")
    assert code == 1 and "is below the exact supremum" in err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["bounds", "--horizon", "0", "--max-kl", "1"], "T must be a whole number >= 1, got 0"),
        (["bounds", "--horizon", "5"], "Give at least one divergence"),
        (["bounds", "--horizon", "5", "--max-kl", "-1"], "max_kl must be a number >= 0, got -1"),
        (["bounds", "--horizon", "5", "--max-kl", "nan"], "got nan"),
        (
            ["bounds", "--horizon", "5", "--max-kl", "1e-4", "--max-tv", "0.5"],
            "max_tv = 0.5 exceeds",
        ),
        (["bounds", "--horizon", "5", "--max-kl", "1", "--reward-range", "1", "0"], "low < high"),
        (["mdp", "tree", "--vocab", "100", "--length", "9"], "V^T = 100^9"),
        (["invert", "--horizon", "5", "--target", "-1"], "target must be > 0, got -1"),
        (["mdp", "product", "--p", "1.0"], "p must lie strictly between 0 and 1, got 1"),
    ],
)
def test_bad_input_exits_with_2_and_one_sentence(capsys, arguments, sentence):
    code, out, err = run(capsys, *arguments)
    assert code == 2 and out == ""
    assert sentence in err and err.count("\n") == 1


def test_module_entry_point_and_lazy_imports():
    program = (
        "import sys, theory, theory.cli, theory.bounds, theory.certify, theory.gradients;"
        "print(sorted({'torch', 'sympy', 'matplotlib', 'trm_ext'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
    done = subprocess.run(
        [sys.executable, "-m", "theory", "bounds", "--horizon", "4096", "--seq-kl", "0.01"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "0.01" in done.stdout


def test_a_reader_that_stops_early_is_no_error():
    process = subprocess.Popen(
        [sys.executable, "-m", "theory", "tables"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 0
