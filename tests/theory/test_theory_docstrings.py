# SPDX-License-Identifier: Apache-2.0
"""Every public function says its formula, assumptions, source, and shows an example."""

import importlib
import inspect
import pkgutil
import re

import pytest

import theory

SKIP = {"theory.__main__"}
MODULES = [
    name for _, name, _ in pkgutil.walk_packages(theory.__path__, "theory.") if name not in SKIP
]


def public_functions():
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name in getattr(module, "__all__", []):
            thing = getattr(module, name)
            if inspect.isfunction(thing) and thing.__module__ == module_name:
                yield pytest.param(thing, id=f"{module_name}.{name}")


@pytest.mark.parametrize("function", list(public_functions()))
def test_docstring_has_every_part(function):
    text = inspect.getdoc(function) or ""
    assert text.splitlines()[0].endswith(".")
    assert ">>>" in text, "no example"
    if function.__module__ in ("theory.checks", "theory.cli", "theory.symbolic"):
        return
    assert "Source:" in text or "Source\n" in text, "no source"
    assert re.search(r"Assum|assum", text), "no assumptions"


@pytest.mark.parametrize("name", ["theory.bounds.paper", "theory.bounds.sharp", "theory.certify"])
def test_functions_of_a_kl_state_direction_and_unit(name):
    module = importlib.import_module(name)
    for item in module.__all__:
        thing = getattr(module, item)
        if not inspect.isfunction(thing):
            continue
        if not any("kl" in p for p in inspect.signature(thing).parameters):
            continue
        text = inspect.getdoc(thing) or ""
        assert "rollout" in text and "nats" in text, item


@pytest.mark.parametrize(
    "name",
    [
        "theory.bounds.paper",
        "theory.bounds.sharp",
        "theory.certify",
        "theory.exact",
        "theory.gradients",
        "theory.divergences",
    ],
)
def test_functions_state_their_range(name):
    module = importlib.import_module(name)
    for item in module.__all__:
        thing = getattr(module, item)
        if inspect.isfunction(thing) and thing.__module__ == name:
            assert re.search(r"[Rr]ange|\[0, ", inspect.getdoc(thing) or ""), item


def test_links_inside_the_page_have_targets():
    from pathlib import Path

    page = (Path(theory.__file__).parents[1] / "docs" / "theory.md").read_text()
    targets = re.findall(r"^\(([a-z0-9-]+)\)=$", page, flags=re.M)
    linked = set(re.findall(r"\]\(#([a-z0-9-]+)\)", page))
    assert linked and linked <= set(targets)
    assert len(targets) == len(set(targets))


def test_nobody_says_forward_or_reverse_kl():
    for module_name in MODULES:
        source = inspect.getsource(importlib.import_module(module_name)).lower()
        assert "forward kl" not in source and "reverse kl" not in source, module_name


def test_anchors_of_the_proofs_exist():
    from pathlib import Path

    page = (Path(theory.__file__).parents[1] / "docs" / "theory.md").read_text()
    defined = set(re.findall(r"^\(([a-z0-9-]+)\)=$", page, flags=re.M))
    used = set()
    for module_name in MODULES:
        source = inspect.getsource(importlib.import_module(module_name))
        used |= set(re.findall(r"theory\.md#([a-z0-9-]+)", source))
        used |= set(re.findall(r'_ours\("([a-z0-9-]+)"\)', source))
        used |= set(re.findall(r"and #([a-z0-9-]+)", source))
    missing = sorted(used - defined)
    assert not missing, f"docs/theory.md has no anchor for {missing}"
