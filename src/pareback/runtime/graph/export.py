"""Calls ``torch.export`` and tidies its graph, or says in a sentence why a model cannot be captured."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from ...artifact.export import differs_for_one, refuse_or_warn
from ...errors import InvalidValue
from .operation import changes_its_argument
from .signature import ExampleInputs

aten = torch.ops.aten


def exported(model: nn.Module, example: ExampleInputs) -> ExportedProgram:
    """Export a model in evaluation mode, for a batch of any size."""
    # A batch of one would be taken for a constant.
    args, named = _each((example.args, example.named), lambda x: torch.cat([x, x]) if x.shape[0] == 1 else x)
    batch = torch.export.Dim("batch", min=1)
    bound = example.call.signature.bind(*args, **named)
    shapes = _each(dict(bound.arguments), lambda _: {0: batch})
    try:
        with _quiet():
            program = torch.export.export(model, args, named, dynamic_shapes=shapes)
    except Exception as error:
        _try(model, example)
        raise InvalidValue(f"{type(model).__name__} cannot be captured: {_why(error)}") from error
    _check_state(model, program)
    one, one_named = _each((example.args, example.named), lambda x: x[:1])
    if differs_for_one(model, program.module(), one, one_named):
        refuse_or_warn(model, example.inputs[0].shape[0] == 1)
    return program


def _check_state(model: nn.Module, program: ExportedProgram) -> None:
    """Refuse a model whose forward changes its own tensors: calls of an engine may overlap, and some are trials."""
    signature = program.graph_signature
    own = {**signature.inputs_to_buffers, **signature.inputs_to_lifted_tensor_constants}
    for node in program.graph.nodes:
        changed = node if node.op == "call_function" and changes_its_argument(node.target) else None
        while changed is not None and changed.op == "call_function":
            changed = changed.args[0] if _shows_its_argument(changed) else None
        if changed is not None and changed.name in own:
            raise InvalidValue(
                f"{type(model).__name__} cannot be captured: its forward changes {own[changed.name]!r}, and calls of "
                "an engine may overlap. Pass such state in and return it, or leave it as it is in eval mode."
            )


def _shows_its_argument(node: fx.Node) -> bool:
    """Whether an operator's result is its argument, or a view of it."""
    schema = getattr(node.target, "_schema", None)
    shows = schema is not None and any(one.alias_info is not None for one in schema.returns)
    return shows and bool(node.args) and isinstance(node.args[0], fx.Node)


def _each(arguments: Any, change: Any) -> Any:
    return torch.utils._pytree.tree_map_only(Tensor, change, arguments)


def _try(model: nn.Module, example: ExampleInputs) -> None:
    """Call the model as it is: where that fails, it is not for the export."""
    args, named = _each((example.args, example.named), Tensor.clone)
    try:
        model(*args, **named)
    except Exception as error:
        raise InvalidValue(
            f"{type(model).__name__} itself does not run on the example inputs: {_first_line(error)}"
        ) from error


def _why(error: Exception) -> str:
    text = str(error)
    if isinstance(error, GuardOnDataDependentSymNode) or "data-dependent" in text:
        return (
            "what it computes next depends on its data (as in `if x.sum() > 0`). "
            "Write such a choice with torch.where, or compile the parts on either side of it."
        )
    if "Constraints violated" in text or "specialized it to be a constant" in text:
        return (
            "it works for the example's batch size alone (as with `x.reshape(2, -1)` or `if x.shape[0] == 2`). "
            "The batch must be free: write x.shape[0] or flatten(1) there."
        )
    return (
        f"torch.export says {_first_line(error)!r}. It reads tensor operations on a batch of any size, "
        "without choices that depend on the data."
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what torch.export prints and logs of its insides from burying the sentence."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    silent = io.StringIO()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(silent), contextlib.redirect_stderr(silent):
            # LSTMs and GRUs keep lists of their weights
            warnings.filterwarnings("ignore", "The tensor attributes? .* assigned during export")
            yield
    finally:
        logging.disable(before)


def tidy(graph: fx.Graph) -> None:
    """Remove what computes nothing, and let every reader see what was changed in place."""
    _let_later_readers_see_changes(graph)
    _remove_dropout(graph)
    _remove_unused(graph)


def _let_later_readers_see_changes(graph: fx.Graph) -> None:
    """Where an operator changes its argument in place, let what comes after it read the operator's result instead."""
    order = {node: number for number, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if node.op == "call_function" and changes_its_argument(node.target):
            changed = node.args[0]
            if isinstance(changed, fx.Node):
                changed.replace_all_uses_with(node, delete_user_cb=functools.partial(_comes_after, order, node))


def _remove_dropout(graph: fx.Graph) -> None:
    """In evaluation dropout returns its argument, and would keep linear layers apart that could run together."""
    for node in list(graph.nodes):
        if node.target in (aten.dropout.default, aten.dropout_.default) and not node.args[2]:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _remove_unused(graph: fx.Graph) -> None:
    """A head that only training uses is computed all the same, and what nobody reads has no place in the engine."""
    for node in reversed(list(graph.nodes)):
        if node.op != "call_function" or node.users or node.is_impure() or changes_its_argument(node.target):
            continue
        graph.erase_node(node)


def _comes_after(order: dict[fx.Node, int], node: fx.Node, user: fx.Node) -> bool:
    return order[user] > order[node]
