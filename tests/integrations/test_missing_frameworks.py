"""A callback whose framework is not installed says what to install; the package itself needs none of them."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import pareback as pb

pytestmark = pytest.mark.slow  # many seconds in all


@pytest.mark.parametrize("packages", [("lightning", "pytorch_lightning"), ("transformers",)], ids=lambda p: p[0])
def test_a_framework_that_is_not_installed(packages: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"pareback.integrations.{packages[0]}"
    monkeypatch.delitem(sys.modules, name, raising=False)
    for module in [one for one in sys.modules if one.split(".")[0] in packages]:
        monkeypatch.delitem(sys.modules, module)
    for package in packages:
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(pb.UserError, match=r"pip install 'pareback\[frameworks\]'"):
        importlib.import_module(name)


def test_importing_the_others_needs_no_framework() -> None:
    code = (
        "import sys, pareback.integrations.dcp, pareback.integrations.accelerate, pareback.integrations.peft;"
        "print(sorted({'lightning', 'transformers', 'accelerate', 'peft'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
