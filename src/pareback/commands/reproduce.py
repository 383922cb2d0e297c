"""``pareback reproduce``: the paper's tables and curves, trained again."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from ..messages import did_you_mean
from .arguments import Command, Parser, UsageError, output_path, seeds


def _options(parser: Parser) -> None:
    add = parser.add_argument
    add("experiment", metavar="EXPERIMENT", help="one of the above")
    add("--data.path", dest="data", metavar="FILE", help="CIFAR-100 as a .npz file; for imagenette, its folder")
    add(
        "--out",
        type=output_path,
        default=Path("results/paper"),
        metavar="DIR",
        help="where tables and pictures go (%(default)s)",
    )
    add(
        "--runs",
        type=output_path,
        default=Path("runs/paper"),
        metavar="DIR",
        help="where the runs go (%(default)s)",
    )
    add("--recipes", type=Path, metavar="DIR", help="the rows' recipes (recipes/paper, here or in the clone)")
    add("--only", metavar="A,B", help="these rows alone, in this order")
    add("--seeds", metavar="N", help="how many: 3 is 0,1,2; or which: 0,5, or 5, for that one (1)")
    add("--epochs", type=int, metavar="N", help="shorten to N epochs, with as many restarts")
    add("--width", type=int, metavar="N", help="shrink the network to this width")
    add("--device", default="auto", metavar="NAME", help="auto, cpu, cuda or cuda:N (%(default)s)")
    add("--seconds", type=float, metavar="N", help="begin no row that would end later than N seconds from now")
    add("--collect", action="store_true", help="train nothing: write tables and pictures of the rows there are")
    add("--quiet", action="store_true", help="print a line per row, not per epoch")


def _run(options: Namespace) -> None:
    from ..lab import environment
    from ..reproduce.curves import CURVES, reproduce_curves
    from ..reproduce.imagenette import IMAGENETTE, collect_imagenette, reproduce_imagenette
    from ..reproduce.paper import EXPERIMENTS
    from ..reproduce.peers import PEERS
    from ..reproduce.peers_runs import collect_peers, reproduce_peers
    from ..reproduce.runner import RowPlan, collect, reproduce

    began = environment.process_start()
    experiments = {**EXPERIMENTS, CURVES.name: CURVES, PEERS.name: PEERS, IMAGENETTE.name: IMAGENETTE}
    if options.experiment not in experiments:
        hint = did_you_mean(options.experiment, experiments) or f" Write one of: {', '.join(experiments)}."
        raise UsageError(f"There is no experiment {options.experiment!r}.{hint}")
    experiment = experiments[options.experiment]
    _check(options)
    if options.collect:
        rows = options.out / "rows"
        if not any(rows.glob("*.json")):
            raise UsageError(
                f"There are no rows in {str(rows)!r}. Train some without --collect, or give another folder with --out."
            )
        own = {PEERS.name: collect_peers, IMAGENETTE.name: collect_imagenette}.get(experiment.name)
        for path in own(options.out) if own else collect(experiment, options.out):
            print(f"wrote {path}")
        return
    if options.data is None:
        data = "the folder of Imagenette" if experiment is IMAGENETTE else "the .npz file of CIFAR-100"
        raise UsageError(f"--data.path is missing. Give {data} with it.")
    plan = RowPlan(
        out=options.out,
        runs=options.runs,
        data=options.data,
        recipes=options.recipes,
        only=tuple(options.only.split(",")) if options.only else (),
        seeds=seeds("1" if options.seeds is None else options.seeds),
        epochs=options.epochs,
        width=options.width,
        device=options.device,
        seconds=options.seconds,
        quiet=options.quiet,
        began=began,
    )
    if experiment is CURVES:
        reproduce_curves(plan)
    elif experiment is PEERS:
        reproduce_peers(plan)
    elif experiment is IMAGENETTE:
        reproduce_imagenette(plan)
    else:
        reproduce(experiment, plan)


def _check(options: Namespace) -> None:
    """Refuse numbers that no training has, and what --collect would not read."""
    for name, example in (("epochs", 30), ("width", 4), ("seconds", 3600)):
        value, least = getattr(options, name), "above 0" if name == "seconds" else "at least 1"
        if value is not None and not (value > 0):  # nan is no number of seconds either
            raise UsageError(f"--{name} {value:g} must be {least}. Write --{name} {example}, or leave it out.")
    about_training = ("only", "seeds", "epochs", "width", "seconds")
    given = [f"--{name}" for name in about_training if getattr(options, name) is not None]
    if options.collect and given:
        raise UsageError(
            f"{given[0]} has no effect with --collect, which trains nothing and shows all rows that there are. Leave "
            "one of them out."
        )


COMMAND = Command(
    "Train one of the paper's tables or curves again.",
    _options,
    _run,
    "EXPERIMENT --data.path FILE [--only A,B] [--seeds N] [--collect] [OPTIONS]",
    "  table2      the six rows of Table 2\n"
    "  ste         with and without the straight-through estimator\n"
    "  exact       exact budgets of 85 to 99 %\n"
    "  one-cycle   the same without restarts\n"
    "  taught      with the dense network as a teacher\n"
    "  trials      what costs accuracy at 98 %, in 40 epochs\n"
    "  curves      the trade-off curve, with thinner dense networks, in 40 epochs\n"
    "  figure7     that curve as the paper trained it, in 120 epochs\n"
    "  losses      Eq. 8, 10 and 11, in 40 epochs\n"
    "  peers       the exact budget and its peers, on a WRN and a ViT-Tiny; it\n"
    "              chooses seeds itself\n"
    "  imagenette  ResNet-50 and AlexNet on photographs, sparsified in 20 epochs\n\n"
    "Rows that are there are not trained again, and rows that were cut off go on.",
    (
        "pareback reproduce table2 --data.path cifar100.npz",
        "pareback reproduce table2 --collect",
    ),
)
