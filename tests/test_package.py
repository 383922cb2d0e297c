"""The package as a whole: public names, the direction of imports, what it depends on and ships."""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib.resources
import importlib.util
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from importlib.metadata import PackageNotFoundError, metadata, version
from pathlib import Path

import pytest

import pareback as pb

SOURCE = Path(pb.__file__).parent
ROOT = Path(__file__).parent.parent

#: Modules may import from their own layer or from those above them in this list.
LAYERS = [
    {"_version", "_early_interrupt", "errors", "files", "messages", "shrink"},
    {"costs"},
    {"kernels", "sharding"},
    {"thresholds"},
    {"goals"},
    {"methods"},
    {"pruning"},
    {"report", "plan", "oneshot", "freeze", "recalibrate"},
    {"artifact", "runtime", "integrations"},
    {"lab.environment", "lab.optional"},
    {"lab.recipe"},
    {"lab.data", "lab.models"},
    {"runs"},
    {"lab"},
    {"curves"},
    {"reproduce", "bench"},
    {"page"},
    {"commands"},
    {"cli"},
    {"__init__", "__main__"},
]
CORE = set().union(*LAYERS[:8])


@functools.cache
def files() -> dict[str, Path]:
    """Every module under its dotted name within the package."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = list(path.relative_to(SOURCE).with_suffix("").parts)
        if len(parts) > 1 and parts[-1] == "__init__":
            parts.pop()
        found[".".join(parts)] = path
    return found


def top(name: str) -> str:
    """The module or subpackage directly under pareback."""
    return name.split(".")[0]


def place(name: str) -> str:
    """The entry of LAYERS that a module belongs to: its room within a room, where that has a place of its own."""
    own = ".".join(name.split(".")[:2])
    return own if any(own in names for names in LAYERS) else top(name)


def layer(name: str) -> int:
    return next(number for number, names in enumerate(LAYERS) if place(name) in names)


def imports(name: str, path: Path, at_import_time: bool = False) -> Iterator[tuple[str, bool]]:
    """Yield what a module imports, as (name, whether it is one of the package), the package's own without its prefix.

    With ``at_import_time`` imports within functions and under TYPE_CHECKING are left out.
    """
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    package = "" if package == "__init__" else package

    def visit(node: ast.AST) -> Iterator[tuple[str, bool]]:
        if at_import_time and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            return
        if at_import_time and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            for alias in node.names:
                own = alias.name.split(".")[0] == "pareback"
                yield (alias.name.removeprefix("pareback").removeprefix(".") or "__init__") if own else alias.name, own
        elif isinstance(node, ast.ImportFrom):
            yield from imported_from(node)
        else:
            for child in ast.iter_child_nodes(node):
                yield from visit(child)

    def imported_from(node: ast.ImportFrom) -> Iterator[tuple[str, bool]]:
        module = node.module or ""
        if node.level == 0 and module.split(".")[0] != "pareback":
            yield module, False
            return
        if node.level:
            parents = package.split(".") if package else []
            base = parents[: len(parents) - (node.level - 1)]
            target = ".".join([*base, *filter(None, [module])])
        else:
            target = module.removeprefix("pareback").removeprefix(".")
        for alias in node.names:
            inner = f"{target}.{alias.name}".removeprefix(".")
            yield (inner if inner in known else target or "__init__"), True

    known = files()
    yield from visit(ast.parse(path.read_text()))


# ---------------------------------------------------------------- public names


def test_public_names_are_sorted_and_there() -> None:
    """``__all__`` is sorted, without doubles, and every name can be imported."""
    assert pb.__all__ == sorted(set(pb.__all__))
    for name in pb.__all__:
        assert getattr(pb, name) is not None


def test_what_the_design_promises_is_public() -> None:
    """The words of the ten-line example and its neighbours."""
    assert {"Budget", "Fixed", "Unconstrained", "Pruner", "ParametrizedPruner"} <= set(pb.__all__)
    assert {"freeze", "inspect", "plan", "prune_"} <= set(pb.__all__)


def test_every_public_thing_has_a_docstring() -> None:
    """help() says something about each."""
    silent = [name for name in pb.__all__ if name != "__version__" and not (getattr(pb, name).__doc__ or "").strip()]
    assert silent == []


def test_version_is_the_packages() -> None:
    """One version, which is also that of the installed distribution."""
    assert pb.__version__ == version("pareback")


# ---------------------------------------------------------------- imports


def test_every_module_has_a_layer() -> None:
    """A new module has to be given its place in LAYERS."""
    placed = set().union(*LAYERS)
    assert {place(name) for name in files()} <= placed


@pytest.mark.parametrize("name", files())
def test_imports_point_down(name: str) -> None:
    """A module imports from its own layer or lower ones, wherever in it the import is written.

    An import within a function or for types alone may point sideways or up: report names the mounts it can be asked
    with, and a mount makes its report.
    """
    wrong = [
        other for other, own in imports(name, files()[name], at_import_time=True) if own and layer(other) > layer(name)
    ]
    assert wrong == []


def test_imports_have_no_cycle() -> None:
    """Modules can be loaded in some order; subpackages included."""
    graph = {
        name: {other for other, own in imports(name, path, at_import_time=True) if own and other != name}
        for name, path in files().items()
    }
    order = list(graphlib.TopologicalSorter(graph).static_order())
    assert set(order) >= set(graph)


def test_kernels_know_only_the_pure_functions() -> None:
    """The passes over the weights depend on shrink alone and may be replaced one by one."""
    found = {
        top(other)
        for name, path in files().items()
        if top(name) == "kernels"
        for other, own in imports(name, path)
        if own
    }
    assert found <= {"errors", "kernels", "shrink"}


def test_the_core_needs_torch_alone() -> None:
    """Down to the report, and for the compressed file, only torch and the standard library are imported anywhere.

    Triton comes with torch where there is a GPU, and the fused kernels are only looked at if it is there.
    """
    allowed = {"torch"} | set(sys.stdlib_module_names)
    for name, path in files().items():
        if top(name) not in CORE | {"artifact"}:
            continue
        extra = {other.split(".")[0] for other, own in imports(name, path) if not own} - allowed
        assert extra <= ({"triton"} if name in ("kernels.fused", "kernels.programs") else set()), name


def test_only_sharding_knows_process_groups() -> None:
    """DTensor and torch.distributed stay in one file."""
    for name, path in files().items():
        if top(name) in CORE - {"sharding"}:
            assert not [other for other, _ in imports(name, path) if other.startswith("torch.distributed")], name


def test_no_module_is_named_like_one_of_the_standard_library() -> None:
    """A script run from within the folder would otherwise shadow it."""
    names = {part for name in files() for part in name.split(".")} - {"__init__", "__main__"}
    assert names & set(sys.stdlib_module_names) == set()


@pytest.mark.slow
def test_importing_is_quiet_and_light() -> None:
    """``import pareback`` prints nothing, warns of nothing and pulls in no optional package, nor torch's compiler."""
    code = (
        "import sys, pareback; "
        "heavy = {'sklearn', 'lightning', 'transformers', 'onnx', 'ray', 'matplotlib', 'torchvision'}; "
        "heavy.add('torch._dynamo'); "
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


# ---------------------------------------------------------------- layout


def test_no_two_classes_share_a_name() -> None:
    """A name in a traceback, a pickle or a search leads to one place. Classes within others count too."""
    where: dict[str, list[str]] = {}
    for name, path in files().items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                where.setdefault(node.name, []).append(name)
    assert {name: found for name, found in where.items() if len(found) > 1} == {}


def test_no_folder_is_a_heap() -> None:
    """More than twelve modules in a folder are two ideas: give them rooms. ``__init__`` and ``__main__`` are doors."""
    sizes: dict[str, int] = {}
    for path in SOURCE.rglob("*.py"):
        if not path.name.startswith("_"):  # nor do files count that only start the package
            room = path.parent.relative_to(SOURCE).as_posix()
            sizes[room] = sizes.get(room, 0) + 1
    assert sizes
    assert {room: size for room, size in sizes.items() if size > 12} == {}


# ---------------------------------------------------------------- what is shipped


def test_types_are_shipped() -> None:
    """py.typed is in the package and among the files that a wheel takes along."""
    assert importlib.resources.files("pareback").joinpath("py.typed").is_file()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "py.typed" in project["tool"]["setuptools"]["package-data"]["pareback"]


def test_sources_that_are_compiled_are_shipped() -> None:
    """A source distribution takes along every C++ file: sources through setup.py, headers through MANIFEST.in."""
    setup, manifest = (ROOT / "setup.py").read_text(), (ROOT / "MANIFEST.in").read_text()
    patterns = [line.split()[1] for line in manifest.splitlines() if line.startswith("include ")]
    for path in SOURCE.rglob("*"):
        within = f"src/pareback/{path.relative_to(SOURCE).as_posix()}"
        if path.suffix == ".cpp":
            assert within in setup
        elif path.suffix == ".h":
            assert any(fnmatch(within, pattern) for pattern in patterns)


def test_the_core_depends_on_torch_alone() -> None:
    """Everything else is an extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {dependency.split(">")[0].split("=")[0].strip() for dependency in project["dependencies"]}
    assert names == {"torch"}
    assert project["requires-python"] == ">=3.11"


def test_licences_of_dependencies_are_listed_and_true() -> None:
    """docs/licences.md has every package of pyproject.toml once, with the family that the package itself names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    wanted = sorted({re.match(r"[\w-]+", one)[0] for one in asked} - {"pareback"})  # type: ignore[index]
    table = re.findall(r"^\| ([\w-]+) \| ([^|]+) \|", (ROOT / "docs/licences.md").read_text(), re.MULTILINE)
    listed = {name: licence for name, licence in table if name != "package" and set(name) != {"-"}}
    assert sorted(listed) == wanted
    for name, licence in listed.items():
        family = next(word for word in ("Apache", "BSD", "MIT", "MPL", "GPL", "Python") if word in licence)
        try:
            about = metadata(name)
        except PackageNotFoundError:  # an extra that is not installed here
            continue
        kinds = [one for one in about.get_all("Classifier", []) if one.startswith("License")]
        said = " ".join([about.get("License-Expression") or "", (about.get("License") or "")[:100], *kinds])
        assert family in said, (name, said)
