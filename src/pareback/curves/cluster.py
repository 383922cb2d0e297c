"""Ray as the runs of a curve need it: an instance of its own or a cluster that is there, and whether that will do."""

from __future__ import annotations

import importlib
import importlib.util
import os
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._version import __version__
from ..errors import InvalidValue

#: A curve keeps nothing in Ray's memory: the least that Ray accepts is plenty.
_OBJECT_STORE = 100 * 10**6
#: Seconds for a cluster to take a connection.
_ANSWER = 10.0
#: Seconds to wait for every machine to say what it sees.
_PATIENCE = 120.0


@dataclass(frozen=True)
class Needs:
    """Where runs take place and what each of them takes; None for what suits the machines."""

    address: str | None = None
    cpus: float | None = None
    gpus: float | None = None

    def __post_init__(self) -> None:
        for option, value in (("--cpus-per-run", self.cpus), ("--gpus-per-run", self.gpus)):
            if value is not None and not 0 <= value < float("inf"):
                raise InvalidValue(f"{option} {value:g} must be at least 0.")
        if self.cpus == 0:
            raise InvalidValue("--cpus-per-run 0 leaves a run nothing to work with. Write 0.5 to let two share a CPU.")
        if self.address is not None and self.address.startswith("ray://"):
            raise InvalidValue(
                f"--address {self.address} is that of Ray's client. Run this command on a machine of the cluster, with "
                "--address auto or HOST:6379."
            )


@dataclass(frozen=True)
class Share:
    """What one run takes of a cluster."""

    cpus: float
    gpus: float

    @property
    def threads(self) -> int:
        """Threads of torch within a run."""
        return max(1, int(self.cpus))


def has_ray() -> bool:
    """Whether Ray is installed."""
    return importlib.util.find_spec("ray") is not None


@contextmanager
def connected(needs: Needs) -> Iterator[Any]:
    """Yield the module ``ray``, connected; an instance that was started for it is stopped in the end."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # runs without a GPU say train.device=cpu
    ray = importlib.import_module("ray")
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": False}
    if needs.address is None:
        options |= {"address": "local", "include_dashboard": False, "object_store_memory": _OBJECT_STORE}
        options["num_cpus"] = cpus_here()
    else:
        options["address"] = needs.address
        _knock(needs.address)
    try:
        ray.init(**options)
    except ConnectionError as error:
        raise _nobody_at(needs.address) from error
    except (ValueError, RuntimeError) as error:  # no address at all, or a cluster of another version
        if needs.address is None:
            raise
        said = str(error).strip().splitlines()[0].rstrip(".")
        raise InvalidValue(f"--address {needs.address} cannot be used: {said}. Write auto or HOST:6379.") from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Raise InvalidValue where nobody answers: Ray itself would go on trying for minutes."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        return  # auto, or something that Ray knows
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER).close()
    except (OSError, OverflowError, ValueError) as error:  # a ValueError: no name that a machine could have
        raise _nobody_at(address) from error


def _nobody_at(address: str | None) -> InvalidValue:
    return InvalidValue(
        f"There is no Ray cluster at {address!r}. Start one with: ray start --head; or leave --address out."
    )


def cpus_here() -> int:
    """Return how many CPUs this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1


def share_of(ray: Any, needs: Needs) -> Share:
    """Return what a run takes: as asked, else a GPU where there is one and its part of the CPUs, else one CPU."""
    machines: list[dict[str, float]] = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    all_cpus, all_gpus = (sum(machine.get(name, 0.0) for machine in machines) for name in ("CPU", "GPU"))
    gpus = needs.gpus if needs.gpus is not None else 1.0 if all_gpus >= 1 else 0.0
    usual = min(8.0, max(1.0, all_cpus * gpus // all_gpus)) if gpus and all_gpus else 1.0
    share = Share(needs.cpus if needs.cpus is not None else usual, gpus)
    if not any(m.get("CPU", 0.0) >= share.cpus and m.get("GPU", 0.0) >= share.gpus for m in machines):
        most = max(machines, key=lambda machine: (machine.get("GPU", 0.0), machine.get("CPU", 0.0)))
        raise InvalidValue(
            f"A run takes {share.cpus:g} CPUs and {share.gpus:g} GPUs, and no machine has as many: the largest has "
            f"{most.get('CPU', 0.0):g} and {most.get('GPU', 0.0):g}. Change --cpus-per-run or --gpus-per-run."
        )
    return share


def check_machines(ray: Any, root: Path) -> int:
    """Return how many machines there are; raise InvalidValue if one does not see the store or has another version."""
    root.mkdir(parents=True, exist_ok=True)
    marker = root / f".shared-{uuid.uuid4().hex}"
    marker.write_text("")
    try:
        nodes = {node["NodeID"]: node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]}
        for node, answer in _asked(ray, nodes, marker).items():
            _check_answer(answer, nodes[node], root)
    finally:
        marker.unlink(missing_ok=True)
    return len(nodes)


def look_around(marker: str) -> tuple[bool, str]:
    """Return, on a machine of the cluster, whether a file can be seen there, and the version of this package."""
    return Path(marker).exists(), __version__


def _asked(ray: Any, nodes: dict[str, str], marker: Path) -> dict[str, Any]:
    """Ask every machine, and return the answers or the errors; nothing from those that do not answer in time."""
    on = importlib.import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
    look = ray.remote(look_around)
    asked = {
        look.options(num_cpus=0, scheduling_strategy=on(node, soft=False)).remote(str(marker)): node for node in nodes
    }
    ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_PATIENCE)
    answers = {}
    for reference in ready:
        try:
            answers[asked[reference]] = ray.get(reference)
        except ray.exceptions.RayError as error:
            answers[asked[reference]] = error
    return answers


def _check_answer(answer: Any, machine: str, root: Path) -> None:
    if isinstance(answer, Exception):
        raise InvalidValue(
            f"The machine {machine} cannot run pareback: {str(answer).strip().splitlines()[-1]} Install the same "
            "pareback on every machine of the cluster."
        )
    sees, version = answer
    if version != __version__:
        raise InvalidValue(
            f"The machine {machine} has pareback {version}, this one {__version__}. Install one version."
        )
    if not sees:
        raise InvalidValue(
            f"The machine {machine} does not see {str(root)!r}. Give a folder that all machines share with --root."
        )
