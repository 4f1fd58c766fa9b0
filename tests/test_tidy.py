"""Rules of the code about itself: layering, sizes, banned calls, leftovers.

Goal: what docs/ARCHITECTURE.md and docs/STYLE.md say of the code stays true without a reviewer.
Method: parse the sources; nothing is built or imported. The layers are read from the two tables in
ARCHITECTURE.md, so a new file is one line there, and none here.
"""

import ast
import graphlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "lightckpt"
BINDING = ROOT / "bindings" / "pypmemobj"
CORE = ROOT / "csrc"

FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 400
LINE_COLUMNS_MAX = 100

# Why these may be longer.
LONG_FILES = {
    "tests/conformance/cases.py": "seventy training set-ups, taken over as one file",
}

# What these modules of the package may call although it is banned.
MAY_PRINT = {"cli", "demo"}
BANNED_CALLS = {
    "print": MAY_PRINT,
    "time.sleep": set(),
    "sys.exit": {"cli"},
    "os._exit": set(),
    "pickle.load": {"pickles"},
    "pickle.loads": {"pickles"},
    "pickle.Unpickler": {"pickles"},
    "eval": set(),
    "exec": set(),
}

TORCH_FREE = {
    "errors",
    "buffers",
    "_core",
    "manifest",
    "hoststate",
    "reader",
    "container",
    "copies",
    "archive",
}

# The facade and the door: they may import every layer.
ENTRIES = {"__init__", "__main__"}
# Tools use the package as its users do, through the facade; nothing else in it may.
TOOLS = {"cli", "doctor", "demo"}

LEFTOVERS = re.compile("|".join(rf"\b{word}\b" for word in ("TO" + "DO", "FIX" + "ME", "X" * 3)))
MACHINE_PATHS = re.compile("|".join(rf"(?<![\w.])/{name}/" for name in ("wo" + "rk", "ro" + "ot")))


def files(*suffixes: str) -> list[Path]:
    """Return the project's own files with one of *suffixes*; '' stands for those without one."""
    top = [path for path in ROOT.iterdir() if path.is_file()]
    below = [
        path
        for folder in (".ci", "bench", "bindings", "csrc", "docs", "examples", "lightckpt", "tests")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    return sorted(path for path in top + below if path.suffix in suffixes)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def each(paths: list[Path]) -> pytest.MarkDecorator:
    """Run a test once per path, under the path's name."""
    return pytest.mark.parametrize("path", paths, ids=name_of)


MODULES = [path for path in files(".py") if path.is_relative_to(PACKAGE)]
PYTHON = files(".py")
CPP = files(".cc", ".h")
CORE_FILES = [path for path in CPP if path.is_relative_to(CORE)]
CODE = sorted(PYTHON + CPP + files(".pyi"))
PROSE = files(".md", ".toml", ".txt", "")


def numbered(path: Path) -> list[tuple[int, str]]:
    """Return the lines of *path*, each with its number."""
    return list(enumerate(path.read_text(encoding="utf-8").splitlines(), start=1))


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=name_of(path))


# The layers.


def layers(heading: str) -> list[list[str]]:
    """Return the table under *heading* in ARCHITECTURE.md: for each row, its files' stems."""
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    _, found, after = text.partition(f"\n{heading}")
    assert found, f"docs/ARCHITECTURE.md has no line that starts with {heading!r}"
    table = re.search(r"(?:^\|.*\n)+", after, re.MULTILINE)
    assert table, f"no table after {heading!r}"
    rows = [row.split("|")[2] for row in table[0].splitlines()[2:]]
    return [[Path(name).stem for name in re.findall(r"`([^`]+)`", row)] for row in rows]


PYTHON_LAYERS = layers("Python (`lightckpt/`)")
CORE_LAYERS = layers("C++ (`csrc/`)")


def top_of(path: Path) -> str:
    """Return the first name below the package: ``demo`` for ``lightckpt/demo/model.py``."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULE_NAMES = {module_of(path) for path in MODULES}


def imported_names(path: Path, tree: ast.AST) -> Iterator[str]:
    """Yield every dotted name that *tree* imports, relative ones resolved from *path*."""
    package = module_of(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = ".".join(base + ([node.module] if node.module else []))
            for alias in node.names:
                # ``from . import names`` names a module, ``from .names import normalise`` does not.
                inner = f"{prefix}.{alias.name}"
                yield inner if inner in MODULE_NAMES | {"lightckpt._ffi"} else prefix


def own_imports(path: Path, tree: ast.AST) -> set[str]:
    """Return the modules of the package that *tree*, of the file *path*, imports."""
    names = set(imported_names(path, tree))
    return {name for name in names if name.split(".")[0] == "lightckpt"}


def imports_anywhere(path: Path) -> set[str]:
    return own_imports(path, parse(path))


def row_of(stem: str, rows: list[list[str]]) -> int:
    found = [index for index, row in enumerate(rows) if stem in row]
    assert found, f"{stem} is in no row of docs/ARCHITECTURE.md, section Layers: add it there"
    return found[0]


@each(MODULES)
def test_imports_point_up_the_table(path):
    own = top_of(path)
    if own in ENTRIES:
        return
    row = row_of(own, PYTHON_LAYERS)
    for imported in imports_anywhere(path):
        top = imported.split(".")[1] if "." in imported else "__init__"
        if top == "_ffi":
            assert own == "_core", "only _core knows the compiled module"
        elif top in ENTRIES:
            assert own in TOOLS, f"{own} imports the facade; import the module that it needs"
        elif top != own:
            assert row_of(top, PYTHON_LAYERS) <= row, f"{own} may not import {top}, a layer below"


def test_modules_form_no_import_cycle():
    graph = {
        module_of(path): own_imports(path, runs_on_import(parse(path))) - {"lightckpt"}
        for path in MODULES
        if module_of(path) != "lightckpt"
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def runs_on_import(tree: ast.Module) -> ast.Module:
    """Return *tree* without functions and what only a type checker reads."""

    class Prune(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
            return None

        def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
            return None

        def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
            self.generic_visit(node)
            return node.orelse if "TYPE_CHECKING" in ast.unparse(node.test) else node

    return Prune().visit(tree)


@each([path for path in MODULES if top_of(path) in TORCH_FREE])
def test_the_core_loads_without_torch(path):
    names = imported_names(path, runs_on_import(parse(path)))
    torch = [name for name in names if name.split(".")[0] == "torch"]
    assert not torch, f"{path.name} imports {torch[0]} as it loads"


@each([path for path in PYTHON if path.is_relative_to(BINDING)])
def test_the_binding_of_libpmemobj_stands_alone(path):
    roots = {name.split(".")[0] for name in imported_names(path, parse(path))}
    others = roots - sys.stdlib_module_names - {"bindings", "cffi"}  # the first: relative ones
    assert not others, f"{path.name} imports {others}"


@each(CORE_FILES)
def test_includes_stand_before_the_file(path):
    order = [stem for row in CORE_LAYERS for stem in row]
    row_of(path.stem, CORE_LAYERS)
    for stem in includes(path):
        if stem in ("lightckpt", path.stem):
            assert stem == path.stem or path.stem == "abi", "only abi knows the C header"
            continue
        row_of(stem, CORE_LAYERS)
        assert order.index(stem) < order.index(path.stem), (
            f"{path.name} may not include {stem}.h, which docs/ARCHITECTURE.md has after it"
        )


@each([path for path in CORE_FILES if path.parent == CORE])
def test_what_is_optional_is_known_in_one_place(path):
    inner = re.findall(r'#\s*include\s+"(\w+)/', path.read_text(encoding="utf-8"))
    assert not inner or path.name in {"catalog_kinds.cc", "abi.cc"}, (
        f"{path.name} knows {inner[0]}/"
    )


def includes(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    return [Path(name).stem for name in re.findall(r'^\s*#\s*include\s+"([^"]+)"', text, re.M)]


# Nothing dead.


@each([path for path in MODULES if path.stem not in ENTRIES])
def test_every_module_is_imported_or_run(path):
    name = module_of(path)
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    if f'"{name}:' in pyproject or '__name__ == "__main__"' in path.read_text(encoding="utf-8"):
        return
    users = [other for other in MODULES if other != path and name in imports_anywhere(other)]
    assert users, f"no module of the package imports {name}, and it is not run"


@each([path for path in CPP if path.suffix == ".h"])
def test_every_header_is_included(path):
    users = [other for other in CPP if other != path and path.stem in includes(other)]
    assert users, f"nothing includes {path.name}"


@each([path for path in CORE_FILES if path.suffix == ".cc"])
def test_every_source_is_built(path):
    assert name_of(path) in (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")


@each([path for path in PYTHON if path.is_relative_to(ROOT / "tests")])
def test_every_helper_of_a_test_is_imported(path):
    if path.name.startswith("test_") or path.name in {"conftest.py", "__init__.py"}:
        return
    use = re.compile(rf"\b{path.stem}\b")
    others = (other for other in PYTHON if other not in (path, Path(__file__)))
    users = [other for other in others if use.search(other.read_text(encoding="utf-8"))]
    assert users, f"no other file names {path.stem}"


# Sizes.


@each(CODE)
def test_files_are_one_idea(path):
    lines = len(path.read_text(encoding="utf-8").splitlines())
    if name_of(path) not in LONG_FILES:
        assert lines <= FILE_LINES_MAX, f"{lines} lines, the limit is {FILE_LINES_MAX}"


@pytest.mark.parametrize("name", LONG_FILES)
def test_long_files_are_still_long(name):
    lines = len((ROOT / name).read_text(encoding="utf-8").splitlines())
    assert lines > FILE_LINES_MAX, f"{lines} lines: no exception is needed, remove it"


@each(PYTHON)
def test_functions_fit_a_screen(path):
    long = [
        f"line {node.lineno}: {node.name} has {node.end_lineno - node.lineno + 1}"
        for node in ast.walk(parse(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno - node.lineno >= FUNCTION_LINES_MAX
    ]
    assert not long, f"the limit is {FUNCTION_LINES_MAX} lines; " + ", ".join(long)


@each(sorted([*CODE, ROOT / "CMakeLists.txt", ROOT / "Makefile"]))
def test_lines_fit_the_measure(path):
    wide = [f"{at} has {len(line)}" for at, line in numbered(path) if len(line) > LINE_COLUMNS_MAX]
    assert not wide, f"the limit is {LINE_COLUMNS_MAX} columns; line " + ", line ".join(wide)


@each(sorted(CODE + PROSE))
def test_no_line_ends_in_space(path):
    ends = [at for at, line in numbered(path) if line != line.rstrip()]
    assert not ends, f"space at the end of lines {ends}"


# What is in them.


@each(CODE)
def test_files_open_by_saying_what_they_are(path):
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        assert ast.get_docstring(parse(path)), "no docstring"
    else:
        assert text.startswith(("// ", "/* ", "# ")), "no comment on the first line"


def called_names(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of every call, with names that were imported spelled out."""
    tree = parse(path)
    spelled = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            spelled |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            spelled |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            first, dot, rest = ast.unparse(node.func).partition(".")
            yield node.lineno, spelled.get(first, first) + dot + rest


@each(MODULES + [path for path in PYTHON if path.is_relative_to(BINDING)])
def test_no_banned_calls(path):
    own = top_of(path) if path in MODULES else BINDING.name
    banned = {name for name, allowed in BANNED_CALLS.items() if own not in allowed}
    found = [f"line {line} calls {name}" for line, name in called_names(path) if name in banned]
    assert not found, "; ".join(found)


@each(sorted(CODE + PROSE))
def test_no_leftovers(path):
    found = [f"line {at}: {line.strip()}" for at, line in numbered(path) if LEFTOVERS.search(line)]
    assert not found, "\n".join(found)


@each(sorted(CODE + PROSE + files(".ndjson", ".svg")))
def test_no_machine_paths(path):
    found = [
        f"line {at}: {line.strip()}" for at, line in numbered(path) if MACHINE_PATHS.search(line)
    ]
    assert not found, "\n".join(found)
