"""A storm over training runs: whatever happens to a run, it goes on and ends with the bits of one that was left alone.

    python benchmarks/soak.py --minutes 30 --seed 1 --out results/soak

Every storm is one run in a folder of its own and a few attacks on it, drawn with the seed; then the run is gone on with
and compared, bit for bit, with one that was left alone. A run counts as *lost* if it cannot be gone on with although
nothing destroyed its checkpoints, as *wrong* if it ends with other bits, in a Python traceback, or reports success over
a damaged file, and as *hung* if it takes ten times as long as it should. A storm that went wrong is told with its
number: --storm N repeats it alone.

Runs are forks of a process that has imported everything, except those that are killed while they import. Nothing is
needed but the package, the digits of scikit-learn, and a system with fork and signals.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: forks inherit no threads

import torch

from pareback import cli, files
from pareback.lab import environment
from pareback.lab.data.sources import open_source
from pareback.lab.recipe.reading import to_yaml
from pareback.lab.recipe.schema import DataRecipe, GoalRecipe, OptimizerRecipe, Recipe, TrainRecipe
from pareback.lab.trainer import train
from pareback.runs.checkpoints import previous_of

#: Sixteen epochs of eight steps, with everything that has a state: moments, thresholds, an average, random shifts.
RECIPE = Recipe(
    name="soak",
    data=DataRecipe(batch_size=160),
    goal=GoalRecipe("budget", sparsity=0.9),
    optimizer=OptimizerRecipe("adamw", lr=0.002),
    train=TrainRecipe(epochs=16, ema=0.9, device="cpu"),
)
#: Less of the same, for two processes that share each batch.
RANKS = Recipe(
    name="soak-ranks",
    data=DataRecipe(batch_size=160),
    goal=GoalRecipe("budget", sparsity=0.9),
    train=TrainRecipe(epochs=12, device="cpu"),
)
WRITTEN = ("model.safetensors", "model-ema.safetensors")
#: Seconds after which a process counts as hung, at least; a machine may be busy.
PATIENCE = 120.0


@dataclass
class Ending:
    """How one process ended: its exit code, or the signal below 0, or None if it hung; and what it said."""

    code: int | None
    said: str

    @property
    def is_sentence(self) -> bool:
        """Whether it failed as it should: with a sentence and no traceback."""
        return self.code in (1, 2, 130, 143) and "Traceback" not in self.said


@dataclass
class Count:
    """What came of one kind of attack."""

    tried: int = 0
    told: int = 0
    lost: int = 0
    wrong: int = 0
    hung: int = 0


@dataclass
class Storm:
    """One run, and what has been done to it."""

    number: int
    folder: Path
    chance: random.Random
    recipe: Path
    duration: float
    history: list[str] = field(default_factory=list)
    destroyed: bool = False

    @property
    def command(self) -> list[str]:
        if (self.folder / "recipe.yaml").exists():
            return ["train", "--resume", str(self.folder), "--quiet"]
        return ["train", str(self.recipe), "--out", str(self.folder), "--quiet"]

    def moment(self) -> float:
        """Return a moment of a run, mostly before its end."""
        return self.chance.uniform(0.0, 1.1 * self.duration)


# -- processes -------------------------------------------------------------------------------------------------------


def forked(argv: list[str], log: Path, sabotage: Callable[[], None] | None = None) -> int:
    """Start the command in a fork and return its process."""
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(said, 1)
        os.dup2(said, 2)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        if sabotage is not None:
            sabotage()
        code = cli.main(argv)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def ended(process: int, log: Path, patience: float = PATIENCE) -> Ending:
    """Wait for a fork; one that does not end is killed."""
    until = time.monotonic() + patience
    while time.monotonic() < until:
        found, status = os.waitpid(process, os.WNOHANG)
        if found:
            return Ending(os.waitstatus_to_exitcode(status), log.read_text(errors="replace"))
        time.sleep(0.005)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return Ending(None, log.read_text(errors="replace"))


def gone_on(storm: Storm, sabotage: Callable[[], None] | None = None) -> Ending:
    log = storm.folder.with_suffix(".log")
    return ended(forked(storm.command, log, sabotage), log)


# -- attacks: each does one thing to a run and returns how its process ended -----------------------------------------


def by_signal(number: int) -> Callable[[Storm], Ending]:
    def attack(storm: Storm) -> Ending:
        log = storm.folder.with_suffix(".log")
        process = forked(storm.command, log)
        time.sleep(storm.moment())
        os.kill(process, number)  # a process that has ended is not waited for yet, so that the number is still its own
        return ended(process, log)

    return attack


def stopped_for_a_while(storm: Storm) -> Ending:
    log = storm.folder.with_suffix(".log")
    process = forked(storm.command, log)
    time.sleep(storm.moment())
    os.kill(process, signal.SIGSTOP)
    time.sleep(storm.chance.uniform(0.1, 1.5))
    os.kill(process, signal.SIGCONT)
    return ended(process, log)


def killed_while_importing(storm: Storm) -> Ending:
    process = subprocess.Popen(
        [sys.executable, "-m", "pareback", *storm.command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        process.wait(timeout=storm.chance.uniform(0.0, 4.0))
    except subprocess.TimeoutExpired:
        process.send_signal(storm.chance.choice([signal.SIGKILL, signal.SIGTERM]))
    return Ending(process.wait(timeout=PATIENCE), "")


def at_a_call(owner: Any, name: str, number: int, act: Callable[[], None], before: bool) -> Callable[[], None]:
    """Return a sabotage: do something before or after the so manieth call of a function."""

    def sabotage() -> None:
        function, calls = getattr(owner, name), iter(range(1, 1_000_000))

        def acting(*args: Any, **kwargs: Any) -> Any:
            here = next(calls) == number
            if here and before:
                act()
            found = function(*args, **kwargs)
            if here and not before:
                act()
            return found

        setattr(owner, name, acting)

    return sabotage


def killed_at_a_write(storm: Storm) -> Ending:
    """SIGKILL right before or after a file is opened, brought to the disk, linked or renamed."""
    owner, name = storm.chance.choice([(os, "replace"), (os, "fsync"), (os, "link"), (torch, "save")])
    number, before = storm.chance.randrange(1, 30), storm.chance.random() < 0.5
    return gone_on(storm, at_a_call(owner, name, number, lambda: os.kill(os.getpid(), signal.SIGKILL), before))


def failing_writes(*codes: int) -> Callable[[Storm], Ending]:
    """Let one write fail as a full or read-only disk does."""

    def attack(storm: Storm) -> Ending:
        code = storm.chance.choice(codes)
        name = storm.chance.choice(["replace", "fsync"])

        def fail() -> None:
            raise OSError(code, os.strerror(code), str(storm.folder / "checkpoint.pt.tmp"))

        return gone_on(storm, at_a_call(os, name, storm.chance.randrange(1, 60), fail, before=True))

    return attack


def small_files(storm: Storm) -> Ending:
    """Let no file grow beyond a limit, as ulimit -f and quotas do: the kernel itself refuses."""
    limit = storm.chance.randrange(1_000, 1_000_000)
    return gone_on(storm, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY)))


def little_memory(storm: Storm) -> Ending:
    """Let the process have a little more memory than it has."""
    more = storm.chance.randrange(0, 30 << 20)

    def sabotage() -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, resource.RLIM_INFINITY))

    return gone_on(storm, sabotage)


def damaged_checkpoint(storm: Storm) -> Ending:
    """Flip a bit, zero a block, write over bytes or cut the last checkpoint off, then go on and be killed or not."""
    path = storm.folder / "checkpoint.pt"
    if not path.exists():  # too early: let there be one
        by_signal(signal.SIGTERM)(storm)
        if not path.exists() or (storm.folder / "result.json").exists():
            return gone_on(storm)
    previous = previous_of(path)
    storm.destroyed = not previous.exists() or path.samefile(previous)  # the only copy, then
    content, chance = bytearray(path.read_bytes()), storm.chance
    start = chance.randrange(len(content))
    kind = chance.choice(["bit", "zeros", "bytes", "cut"])
    if kind == "bit":
        content[start] ^= 1 << chance.randrange(8)
    elif kind == "zeros":
        content[start : start + 512] = bytes(len(content[start : start + 512]))
    elif kind == "bytes":
        content[start : start + 16] = chance.randbytes(len(content[start : start + 16]))
    else:
        del content[start:]
    path.write_bytes(content)
    return gone_on(storm)


def several_at_once(storm: Storm) -> Ending:
    """Three processes in one folder: one trains, the others say so or find the run finished."""
    logs = [storm.folder.with_suffix(f".{number}.log") for number in range(3)]
    command = storm.command
    processes = [forked(command, log) for log in logs]
    endings = [ended(process, log) for process, log in zip(processes, logs, strict=True)]
    odd = [each for each in endings if each.code != 0 and not each.is_sentence]
    done = [each for each in endings if each.code == 0]
    return (odd or done or endings)[0]


def lost_lock(storm: Storm) -> Ending:
    """The lock's file is deleted under a run, and a second process comes in."""
    log, other = storm.folder.with_suffix(".log"), storm.folder.with_suffix(".other.log")
    process = forked(storm.command, log)
    time.sleep(storm.moment())
    (storm.folder / ".lock").unlink(missing_ok=True)
    second = ended(forked(storm.command, other), other)
    first = ended(process, log)
    return next((each for each in (first, second) if each.code != 0 and not each.is_sentence), first)


ATTACKS: dict[str, tuple[Callable[[Storm], Ending], int]] = {
    "SIGKILL at any moment": (by_signal(signal.SIGKILL), 18),
    "SIGTERM at any moment": (by_signal(signal.SIGTERM), 4),
    "SIGINT at any moment": (by_signal(signal.SIGINT), 3),
    "SIGSTOP, and on": (stopped_for_a_while, 2),
    "killed while importing": (killed_while_importing, 2),
    "SIGKILL at a write or rename": (killed_at_a_write, 12),
    "disk full": (failing_writes(errno.ENOSPC, errno.EDQUOT), 3),
    "read-only, or an error of the disk": (failing_writes(errno.EROFS, errno.EACCES, errno.EIO), 3),
    "limit on the size of files": (small_files, 2),
    "limit on memory": (little_memory, 2),
    "checkpoint damaged": (damaged_checkpoint, 6),
    "three processes in one folder": (several_at_once, 2),
    "lock deleted, second process": (lost_lock, 2),
}


# -- one storm -------------------------------------------------------------------------------------------------------


class Soak:
    """Storms one after another, and what came of them."""

    def __init__(self, place: Path, seed: int) -> None:
        self._place, self._seed = place, seed
        self.counts = {name: Count() for name in ATTACKS}
        self.counts["finished model damaged"] = Count()
        self.storms = self.processes = 0
        self.faults: list[dict[str, Any]] = []
        self._recipe = place / "recipe.yaml"
        self._recipe.write_text(to_yaml(RECIPE), encoding="utf-8")
        open_source(RECIPE.data, torch.device("cpu"))  # what every fork would read
        train(RECIPE, place / "first", quiet=True)
        began = time.monotonic()
        log = place / "alone.log"
        alone = ended(forked(["train", str(self._recipe), "--out", str(place / "alone"), "--quiet"], log), log)
        assert alone.code == 0, alone.said
        self._duration = time.monotonic() - began
        self._wanted = digests(place / "alone")
        assert self._wanted == digests(place / "first"), "this machine does not give the same bits twice"

    def run(self, number: int) -> None:
        """Let one storm go over a run, and judge it."""
        chance = random.Random(f"{self._seed}/{number}")
        folder = self._place / f"storm-{number}"
        storm = Storm(number, folder, chance, self._recipe, self._duration)
        for _ in range(chance.randrange(1, 7)):
            name = chance.choices(list(ATTACKS), [weight for _, weight in ATTACKS.values()])[0]
            if not self._attacked(storm, name) or (folder / "result.json").exists():
                break
        self._judged(storm)
        self.storms += 1
        for path in self._place.glob(f"storm-{number}*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _attacked(self, storm: Storm, name: str) -> bool:
        storm.history.append(name)
        storm.destroyed = False
        count, ending = self.counts[name], ATTACKS[name][0](storm)
        count.tried += 1
        self.processes += 1
        if ending.code is None:
            count.hung += 1
            return self._fault(storm, "hung", ending)
        if storm.destroyed and ending.is_sentence and "Delete it" in ending.said:
            count.told += 1  # the only copy was damaged: it is named, and nothing is passed off for it
            (storm.folder / "checkpoint.pt").unlink()
            previous_of(storm.folder / "checkpoint.pt").unlink(missing_ok=True)
            return True
        if ending.code > 0 and not ending.is_sentence:
            count.wrong += 1
            return self._fault(storm, "no sentence", ending)
        if name == "checkpoint damaged" and ending.code != 0:
            count.lost += 1
            return self._fault(storm, "lost", ending)
        count.told += ending.is_sentence or "Going on from" in ending.said
        return True

    def _judged(self, storm: Storm) -> None:
        """Go on to the end, and compare; then damage what came of it."""
        count = self.counts[storm.history[-1]]
        ending = gone_on(storm)
        if ending.code is None:
            count.hung += 1
            self._fault(storm, "hung at the end", ending)
        elif ending.code != 0:
            count.lost += 1
            self._fault(storm, "lost", ending)
        elif digests(storm.folder) != self._wanted or epochs(storm.folder) != list(range(1, RECIPE.train.epochs + 1)):
            count.wrong += 1
            shutil.copytree(storm.folder, self._place.with_suffix(f".fault-{storm.number}"))  # to look at
            self._fault(storm, "other bits", ending)
        elif storm.number % 4 == 0:
            self._after_the_end(storm)

    def _after_the_end(self, storm: Storm) -> None:
        count = self.counts["finished model damaged"]
        count.tried += 1
        file = storm.folder / storm.chance.choice(WRITTEN)
        content = bytearray(file.read_bytes())
        content[storm.chance.randrange(len(content))] ^= 1 << storm.chance.randrange(8)
        file.write_bytes(content)
        ending = gone_on(storm)
        if ending.code is None:
            count.hung += 1
        elif ending.is_sentence and file.name in ending.said:
            count.told += 1
        else:
            count.wrong += 1
            self._fault(storm, "a damaged model passed off", ending)

    def _fault(self, storm: Storm, what: str, ending: Ending) -> bool:
        fault = {"storm": storm.number, "what": what, "history": list(storm.history), "code": ending.code}
        self.faults.append({**fault, "said": ending.said[-2000:].replace(str(self._place), "...")})
        print(
            f"storm {storm.number}: {what} after {storm.history}: {ending.code} {ending.said[-600:]}", file=sys.stderr
        )
        return False


def digests(run: Path) -> list[str]:
    return [hashlib.sha256((run / name).read_bytes()).hexdigest() for name in WRITTEN if (run / name).exists()]


def epochs(run: Path) -> list[int]:
    return [json.loads(line)["epoch"] for line in (run / "metrics.jsonl").read_text().splitlines()]


# -- ranks -----------------------------------------------------------------------------------------------------------


def torchrun(argv: list[str], log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "pareback"]
    with open(log, "wb") as said:
        return subprocess.Popen([*command, *argv], stdout=said, stderr=said, start_new_session=True)


def ranks_of(process: int) -> list[int]:
    """Return the processes that torchrun started."""
    children = Path(f"/proc/{process}/task/{process}/children")
    return [int(word) for word in children.read_text().split()] if children.exists() else []


def lose_a_rank(place: Path, seed: int, number: int, wanted: list[str], log: Path) -> str:
    """Kill one of two processes that train together; return what was wrong with the end of it, or nothing."""
    chance, folder = random.Random(f"{seed}/rank/{number}"), place / f"ranks-{number}"
    recipe = place / "ranks.yaml"
    process = torchrun(["train", str(recipe), "--out", str(folder), "--quiet"], log)
    metrics, until = folder / "metrics.jsonl", time.monotonic() + PATIENCE
    after = chance.randrange(0, RANKS.train.epochs - 1)
    while process.poll() is None and time.monotonic() < until:
        if metrics.exists() and len(metrics.read_bytes().splitlines()) > after:
            break
        time.sleep(0.01)
    for rank in ranks_of(process.pid)[-1:] if chance.random() < 0.5 else ranks_of(process.pid)[:1]:
        os.kill(rank, signal.SIGKILL)
    try:
        process.wait(timeout=PATIENCE)
        again = torchrun(["train", "--resume", str(folder), "--quiet"], log)
        again.wait(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return "hung"
    if again.returncode != 0:
        return "lost"
    return "" if digests(folder) == wanted else "wrong"


def rank_storms(place: Path, seed: int, times: int) -> Count:
    count, log = Count(), place / "ranks.log"
    (place / "ranks.yaml").write_text(to_yaml(RANKS), encoding="utf-8")
    if torchrun(["train", str(place / "ranks.yaml"), "--out", str(place / "ranks"), "--quiet"], log).wait(PATIENCE):
        raise RuntimeError(log.read_text(errors="replace"))
    for number in range(times):
        count.tried += 1
        found = lose_a_rank(place, seed, number, digests(place / "ranks"), log)
        if found:
            setattr(count, found, getattr(count, found) + 1)
            print(f"rank {number}: {found}: {log.read_text(errors='replace')[-1500:]}", file=sys.stderr)
    return count


# -- long runs -------------------------------------------------------------------------------------------------------


def steady(steps: int, calls: int) -> dict[str, Any]:
    """Return memory, handles and threads of this process over many steps of a pruner and calls of the engine."""
    import pareback as pb

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    pruner = pb.Pruner(model, optimizer, pb.Budget(sparsity=0.9), total_steps=steps)
    x, samples = torch.randn(16, 64), []
    for step in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if step % max(steps // 10, 1) == 0:
            samples.append(held())
    pruner.finish()
    engine = pb.compile(model.eval(), x, threads=1)
    served = []
    for call in range(calls):
        engine(x)
        if call % max(calls // 10, 1) == 0:
            served.append(held())
    return {"steps": steps, "calls": calls, "training": samples, "engine": served}


def held() -> dict[str, int]:
    status = Path("/proc/self/status").read_text()
    kilobytes = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    threads = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("Threads"))
    return {"kB": kilobytes, "files": len(os.listdir("/proc/self/fd")), "threads": threads}


# -- the whole -------------------------------------------------------------------------------------------------------


def as_table(found: dict[str, Any]) -> str:
    lines = ["| attack | tried | said so | lost | wrong | hung |", "| --- | ---: | ---: | ---: | ---: | ---: |"]
    for name, count in found["attacks"].items():
        lines.append(f"| {name} | " + " | ".join(f"{count[key]:,}" for key in ("tried", *COLUMNS)) + " |")
    total = Counter[str]()
    for count in found["attacks"].values():
        total.update(count)
    lines.append("| all | " + " | ".join(f"{total[key]:,}" for key in ("tried", *COLUMNS)) + " |")
    return "\n".join(lines)


COLUMNS = ("told", "lost", "wrong", "hung")


def report(found: dict[str, Any]) -> str:
    about = found["machine"]
    text = [
        "# Soak",
        "",
        f"{found['storms']:,} storms in {found['seconds'] / 60:.0f} minutes, seed {found['seed']}, {found['date']}; "
        f"{about['cpu']}, Python {about['python']}, torch {about['torch']}, pareback {about['pareback']}. Each ended "
        "with the bits of a run that was left alone, unless the last three columns say otherwise. *Said so*: the "
        "process ended with a sentence that says how to go on, or said which file it used instead.",
        "",
        as_table(found),
        "",
        f"Again: `{found['command']}`",
        "",
    ]
    if found.get("steady"):
        text += ["", "## Long runs", "", steady_table(found["steady"]), ""]
    return "\n".join(text)


def steady_table(found: dict[str, Any]) -> str:
    lines = ["| what | first, after a tenth | last | files | threads |", "| --- | ---: | ---: | ---: | ---: |"]
    for name, what in (("training", f"{found['steps']:,} steps"), ("engine", f"{found['calls']:,} calls")):
        samples = found[name]
        if len(samples) > 1:
            first, last = samples[1], samples[-1]
            same = [f"{first[key]} → {last[key]}" for key in ("files", "threads")]
            lines.append(f"| {what} | {first['kB']:,} kB | {last['kB']:,} kB | {same[0]} | {same[1]} |")
    return "\n".join(lines)


def soak(place: Path, options: argparse.Namespace) -> dict[str, Any]:
    began = time.monotonic()
    storms = Soak(place, options.seed)
    if options.storm is not None:
        storms.run(options.storm)
    else:
        number = 0
        while time.monotonic() - began < 60 * options.minutes and number < options.storms:
            storms.run(number)
            number += 1
            if number % 20 == 0:
                print(f"{number} storms, {storms.processes} attacks, {len(storms.faults)} faults", flush=True)
    attacks = {name: vars(count) for name, count in storms.counts.items()}
    if options.ranks:
        attacks["one of two ranks killed"] = vars(rank_storms(place, options.seed, options.ranks))
    about = environment.describe(torch.device("cpu"))
    return {
        "seed": options.seed,
        "date": about["start"][:10],
        "seconds": round(time.monotonic() - began),
        "machine": {key: about[key] for key in ("python", "torch", "pareback", "cpu", "platform")},
        "storms": storms.storms,
        "attacks": attacks,
        "faults": storms.faults,
        "steady": steady(options.steps, options.calls) if options.steps else None,
    }


def main(argv: list[str] | None = None) -> int:
    """Run the storms and print the table; 1 if anything was lost, wrong or hung."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--minutes", type=float, default=10.0, help="begin no further storm after so long (%(default)s)")
    add("--storms", type=int, default=10**9, help="at most so many storms")
    add("--storm", type=int, help="repeat one storm alone")
    add("--seed", type=int, default=0, help="decides every attack (%(default)s)")
    add("--ranks", type=int, default=0, help="how often one of two processes is killed (%(default)s)")
    add("--steps", type=int, default=0, help="steps over which memory has to stay flat; 0 leaves it out")
    add("--calls", type=int, default=10_000, help="engine calls over which memory has to stay flat")
    add("--out", type=Path, help="also write soak.json and soak.md into this folder")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    with TemporaryDirectory(prefix="soak-") as place:
        found = soak(Path(place), options)
    words = sys.argv[1:] if argv is None else argv
    found["command"] = " ".join(["python benchmarks/soak.py", *words])
    print(as_table(found))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        files.write_json(options.out / "soak.json", found)
        files.write_text(options.out / "soak.md", report(found))
    bad = sum(count[key] for count in found["attacks"].values() for key in ("lost", "wrong", "hung"))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
