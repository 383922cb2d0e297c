"""Packages of the extra: there or asked for."""

from __future__ import annotations

import json
import sys

import pytest

from pareback.lab.optional import optional


def test_a_module_that_is_there_is_returned() -> None:
    assert optional("json") is json


def test_a_missing_package_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """None in sys.modules is how Python marks a module that cannot be imported."""
    monkeypatch.setitem(sys.modules, "mlxtend", None)
    monkeypatch.delitem(sys.modules, "mlxtend.data", raising=False)
    with pytest.raises(RuntimeError, match=r"^This needs the package 'mlxtend': pip install 'pareback\[lab\]'.$"):
        optional("mlxtend.data")
