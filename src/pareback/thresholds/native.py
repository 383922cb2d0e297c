"""A whole step of thresholds and weights on the CPU in two calls of the C++ library; see kernels/control.h."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels import native
from .controller import ADAM_BETAS, BAND, RELOADED, STRIDE, Controller, NativeRule, Rates
from .exact import GAIN, NEAR, RECOVERY

_STATE = ("r", "threshold", "spread", "peak", "velocity", "square", "drift", "missed", "damping")
_COUNTS = ("nonzero", "band", "step", "normalised")


def _pointers(*names: str) -> list[tuple[str, type]]:
    return [(name, ctypes.c_void_p) for name in names]


class _NativeRule(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int32),
        ("form", ctypes.c_int32),
        ("limits", ctypes.c_int64),
        *_pointers("shares", "budgets", "weights", "target"),
        ("tolerance", ctypes.c_double),
        ("passes", ctypes.c_int64),
    )


class _NativeConstants(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_double)
        for name in ("band", "stride", "gain", "recovery", "near", "reloaded", "first_beta", "second_beta")
    )


class _NativeControl(ctypes.Structure):
    _fields_ = (
        ("count", ctypes.c_int64),
        ("wide", ctypes.c_int64),
        *_pointers(*_STATE),
        *_pointers(*_COUNTS),
        *_pointers("sizes", "least", "most", "floor", "lr", "multiple", "momentum", "adaptive", "sense"),
        ("ramp_steps", ctypes.c_double),
        ("constants", _NativeConstants),
        ("rule", _NativeRule),
    )


class NativeStep:
    """A controller's step, made ready once: everything the library needs is looked up here and stays where it is."""

    def __init__(
        self,
        controller: Controller,
        rule: NativeRule,
        prepared: native.PreparedNative,
        floors: Sequence[int],
        rates: Rates,
        sense: Tensor | None,
    ) -> None:
        self.prepared = prepared
        self._threshold = controller.state.threshold
        number = len(floors)
        self._moments = torch.zeros(number, 5, dtype=torch.float64)
        target = None if rule.target is None else rule.target.double().expand(number)
        #: Kept here, as the library reads them at every step.
        self._numbers: dict[str, Tensor | None] = {
            "sizes": controller.sizes.double(),
            "least": controller.least.double(),
            "most": controller.most.double(),
            "floor": torch.tensor(floors, dtype=torch.int64),
            "sense": None if sense is None else sense.double(),
            "lr": rates.lr,
            "multiple": rates.multiple,
            "momentum": rates.momentum,
            "adaptive": rates.adaptive,
            **controller.state.tensors(),
        }
        own = {"shares": rule.shares, "budgets": rule.budgets, "weights": rule.weights, "target": target}
        self._own = {name: None if value is None else value.double().contiguous() for name, value in own.items()}
        self._control = _NativeControl(
            count=number,
            wide=controller.state.r.dtype == torch.float64,
            ramp_steps=controller.ramp_steps,
            constants=_NativeConstants(BAND, STRIDE, GAIN, RECOVERY, NEAR, RELOADED, *ADAM_BETAS),
            rule=_NativeRule(
                kind=rule.kind,
                form=rule.form,
                limits=0 if rule.shares is None else len(rule.shares),
                tolerance=rule.tolerance,
                passes=rule.passes,
                **{name: _address(value) for name, value in self._own.items()},
            ),
            **{name: _address(value) for name, value in self._numbers.items()},
        )

    def measure(self, grads: Sequence[Tensor | None], share: float) -> None:
        """Let the latents take over edits of their weights, and measure them."""
        self.prepared.moments(grads, self._threshold, share, self._moments)

    def look_at(self, prepared: native.PreparedNative) -> None:
        """Prune other memory than was measured, of the same tensors."""
        self.prepared = prepared

    def advance(self, go: bool, scale: float) -> bool:
        """Move the thresholds by what was measured, gradients times ``scale``, and prune.

        Where ``go`` is False the optimizer skipped its step and nothing moves. Returns whether a tensor fell below its
        floor.
        """
        return native.step(self.prepared, self._control, self._moments, go, scale)


def _address(tensor: Tensor | None) -> int | None:
    assert tensor is None or (tensor.is_contiguous() and tensor.device.type == "cpu")
    return None if tensor is None else tensor.data_ptr()
