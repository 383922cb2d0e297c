"""Torch's global settings for the time of a training, and as they were afterwards."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from ..recipe.schema import Recipe


@contextmanager
def applied(recipe: Recipe, device: torch.device) -> Iterator[None]:
    """Seed torch and choose its algorithms; everything is restored at the end, random states included."""
    exact = recipe.train.deterministic
    if exact:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS refuses to be deterministic
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
        torch.get_float32_matmul_precision(),
    )
    cuda = device.type == "cuda"
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng([device] if cuda else []))
        if cuda:
            stack.enter_context(torch.cuda.device(device))
            # A graph cannot be captured on the default stream, and one stream for all needs no waiting between two.
            side = torch.cuda.Stream(device)
            side.wait_stream(torch.cuda.current_stream(device))
            stack.enter_context(torch.cuda.stream(side))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")  # the recipe says which precision
        torch.manual_seed(recipe.seed)
        torch.use_deterministic_algorithms(exact)
        torch.backends.cudnn.benchmark = cuda and not exact
        if recipe.train.precision != "fp32":
            torch.set_float32_matmul_precision("high")
        try:
            yield
        finally:
            if cuda:
                torch.cuda.synchronize(device)
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
            torch.backends.cudnn.benchmark = before[2]
            torch.set_float32_matmul_precision(before[3])


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """Return the states of the random numbers a model may draw."""
    state = {"cpu": torch.get_rng_state()}
    return state | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def restore_random_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    """Go on with saved random states."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
