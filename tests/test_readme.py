# SPDX-License-Identifier: Apache-2.0
"""README's Python example runs as it stands, and its links lead somewhere."""

import re
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"
CERTIFICATES = README.parent / "docs" / "certificates.md"


def test_the_example_runs():
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    scope: dict[str, object] = {}
    exec(compile(code, str(README), "exec"), scope)
    assert scope["d"].kl.shape == (2, 5)
    assert scope["v"].keep.all() and scope["v"].token_keep.sum() == 8


def test_the_certificate_example_certifies():
    (code,) = re.findall(r"```python\n(.*?)```", CERTIFICATES.read_text(), re.DOTALL)
    scope: dict[str, object] = {}
    exec(compile(code, str(CERTIFICATES), "exec"), scope)
    assert scope["result"].verdict == "CERTIFIED"


def test_the_monitor_example_runs():
    page = README.parent / "docs" / "reports.md"
    code = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)[0]
    scope: dict[str, object] = {}
    exec(compile(code, str(page), "exec"), scope)
    assert 0 < scope["metrics"]["trm/window/seq_kl"] < 0.05


def test_links_lead_somewhere():
    for page in [README, *README.parent.glob("docs/*.md"), README.with_name("CONTRIBUTING.md")]:
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"
