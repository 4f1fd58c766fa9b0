"""The command line: look at stores, check them, copy them, and see the demo.

Tables go to standard output, progress and errors to standard error. With ``--json`` standard output
is one JSON document. Exit codes: 0 it went well, 1 damage was found (``verify``), or the GPU is not
fit for use (``doctor --gpu``; what ``demo`` means by 1 it says itself), 2 wrong usage, or a store
or file that cannot be opened, read or made.

Only ``export`` and the trainers of ``demo`` import torch.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from . import demo
from ._core import Store, Version
from .archive import archive, expand, open_any
from .container import is_container
from .doctor import diagnose
from .errors import CheckpointError, FormatError, NotFoundError
from .listing import describe_contents, describe_store
from .probe import probe
from .reader import identity, must_pin, open_reader, pin_newest, read_manifest, verify

EXIT_OK, EXIT_DAMAGED, EXIT_FAILED = 0, 1, 2
EXIT_INTERRUPTED = 130
MEMORY_FOLDER = Path("/dev/shm")

Arguments = argparse.Namespace
Report = Callable[[int, int], None]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    errors = Console(stderr=True)
    try:
        arguments = _parser().parse_args(argv)
    except SystemExit as stop:  # argparse has said why
        return EXIT_OK if stop.code == 0 else EXIT_FAILED
    try:
        code = int(arguments.command(arguments))
        sys.stdout.flush()
        return code
    except (BrokenPipeError, SystemExit):  # nobody reads on; the latter is how rich says so
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except KeyboardInterrupt:
        errors.print("lightckpt: stopped", markup=False)
        return EXIT_INTERRUPTED
    except (CheckpointError, OSError, ValueError, ImportError) as error:
        errors.print(f"lightckpt: {_line(error)}", markup=False, highlight=False, soft_wrap=True)
        return EXIT_FAILED


def _line(error: Exception) -> str:
    """Say what went wrong, on one line."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lightckpt", description="Look at and copy checkpoints.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, command: Callable[[Arguments], int], text: str) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        one.set_defaults(command=command)
        return one

    def add_path(
        one: argparse.ArgumentParser, text: str = "a store, or an archive", **default: Any
    ) -> None:
        one.add_argument("path", type=Path, metavar="PATH", help=text, **default)
        one.add_argument("--json", action="store_true", help="print JSON")

    demo.add_arguments(add("demo", demo.run, "kill a training run at random and watch it go on"))
    add_path(add("ls", _ls, "list the versions of a store"))
    show = add("show", _show, "show what a version contains: layers, tensors, dtypes, bytes")
    add_path(show)
    show.add_argument("--step", type=int, help="which version (default: the newest)")
    add_path(add("verify", _verify, "compare every byte of every version with its checksum"))
    export = add("export", _export, "write a version for other programs: .safetensors or .pt")
    add_path(export)
    export.add_argument("--step", type=int, help="which version (default: the newest)")
    export.add_argument("--to", type=Path, required=True, metavar="FILE", help="what to write")
    export.add_argument(
        "--allow-pickle", action="store_true", help="unpickle state that was saved so: runs code"
    )
    copy = add("archive", _archive, "copy a version to slow storage, as a store of its own")
    add_path(copy)
    copy.add_argument("dest", type=Path, metavar="DEST", help="a new file, or a folder")
    copy.add_argument("--step", type=int, help="which version (default: the newest)")
    kind = copy.add_mutually_exclusive_group()
    kind.add_argument("--lz4", action="store_true", help="compress: smaller, but no store")
    kind.add_argument("--expand", action="store_true", help="make a store of a compressed archive")
    doctor = add("doctor", _doctor, "say what a path is, what survives there, and how fast it is")
    about = f"a store, a file to be, or a folder (default: {MEMORY_FOLDER})"
    add_path(doctor, about, nargs="?", default=MEMORY_FOLDER)
    doctor.add_argument(
        "--gpu", action="store_true", help="try the GPU and its driver instead, in PATH, a folder"
    )
    return parser


# The commands.


@contextmanager
def _opened(arguments: Arguments, *, workers: int) -> Iterator[Store]:
    """Open PATH for reading; a compressed archive is expanded first."""
    with ExitStack() as stack:
        with _progress("expanding", arguments) as report:
            path = stack.enter_context(open_any(arguments.path, report))
        yield stack.enter_context(open_reader(path, workers=workers))


def _ls(arguments: Arguments) -> int:
    with _opened(arguments, workers=1) as store:
        facts = describe_store(store, arguments.path)
    if arguments.json:
        return _print_json(facts)
    console = Console()
    _print_facts(console, facts)
    console.print(_version_table(facts["versions"]))
    return EXIT_OK


def _show(arguments: Arguments) -> int:
    with _opened(arguments, workers=1) as store:
        facts = describe_store(store, arguments.path)
        version = must_pin(store, arguments.path, arguments.step)
        facts["shown"] = describe_contents(store, version)
    if arguments.json:
        return _print_json(facts)
    console = Console()
    _print_facts(console, facts)
    console.print(_version_table(facts["versions"]))
    shown = facts["shown"]
    console.print(
        f"step {shown['step']}: {shown['tensors']} tensors, {decimal(shown['tensor_bytes'])}; "
        f"host state {decimal(shown['host_bytes'])}; made by {shown['made_by'] or 'unknown'}",
        markup=False,
        highlight=False,
    )
    console.print(_tensor_table(shown["layers"]))
    return EXIT_OK


def _verify(arguments: Arguments) -> int:
    results: list[dict[str, Any]] = []
    seen: set[tuple[int, int]] = set()
    with _opened(arguments, workers=0) as store:
        # As many as there are now: a trainer may go on making new ones.
        for _ in store.versions():
            version = pin_newest(store, without=seen)
            if version is None:
                break
            seen.add(identity(version))
            results.append(_verify_one(store, version, arguments))
            if not version.damaged:
                store.pin(version.version, pinned=False)
    if not results:
        raise NotFoundError(f"{arguments.path} holds no version yet")
    damaged = not all(result["ok"] for result in results)
    if arguments.json:
        _print_json({"path": str(arguments.path), "ok": not damaged, "versions": results})
    else:
        Console().print(_verify_table(results))
    return EXIT_DAMAGED if damaged else EXIT_OK


def _verify_one(store: Store, version: Version, arguments: Arguments) -> dict[str, Any]:
    result: dict[str, Any] = {"step": version.step, "version": version.version}
    try:
        manifest = read_manifest(store, version)
        with _progress(f"step {version.step}", arguments) as report:
            bad = verify(store, version, manifest, report)
        result |= {"bytes": sum(manifest.extents), "error": "", "bad": bad}
    except FormatError as error:
        result |= {"bytes": 0, "error": str(error), "bad": []}
    return {**result, "ok": not result["error"] and not result["bad"]}


def _export(arguments: Arguments) -> int:
    try:
        from .export import export
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"no {error.name}: pip install 'lightckpt[torch]'") from error

    with _waiting(f"exporting to {arguments.to}", arguments):
        export(
            arguments.path,
            arguments.to,
            step=arguments.step,
            allow_pickle=arguments.allow_pickle,
        )
    return _print_made(arguments, arguments.to)


def _archive(arguments: Arguments) -> int:
    with _progress("archiving", arguments) as report:
        if arguments.expand:
            if arguments.step is not None:
                raise ValueError("--step: a compressed archive holds one version only")
            made = expand(arguments.path, arguments.dest, progress=report)
        else:
            made = archive(
                arguments.path,
                arguments.dest,
                step=arguments.step,
                compress="lz4" if arguments.lz4 else None,
                progress=report,
            )
    return _print_made(arguments, made)


def _doctor(arguments: Arguments) -> int:
    if arguments.gpu:
        return _probe(arguments)
    if is_container(arguments.path):
        raise FormatError(f"{arguments.path} is a compressed archive: look at its folder")
    with _waiting("measuring", arguments):
        diagnosis = diagnose(arguments.path)
    if arguments.json:
        return _print_json(diagnosis.as_dict())
    _print_rows(diagnosis.path, diagnosis.rows(), diagnosis.advice)
    return EXIT_OK


def _probe(arguments: Arguments) -> int:
    if not arguments.path.is_dir():
        raise NotFoundError(f"{arguments.path} is no folder: name the one that stores will lie in")
    with _waiting("trying the GPU", arguments):
        findings = probe(arguments.path)
    if arguments.json:
        _print_json(findings.as_dict())
    else:
        _print_rows(f"the first GPU, to {findings.folder}", findings.rows(), findings.reasons)
    return EXIT_OK if findings.snapshot else EXIT_DAMAGED


# What they print.


def _print_json(document: dict[str, Any]) -> int:
    sys.stdout.write(json.dumps(document, indent=2) + "\n")
    return EXIT_OK


def _print_made(arguments: Arguments, path: Path) -> int:
    size = path.stat().st_size
    if arguments.json:
        return _print_json({"path": str(path), "bytes": size})
    Console().print(f"{path}: {decimal(size)}", markup=False, highlight=False, soft_wrap=True)
    return EXIT_OK


def _print_facts(console: Console, facts: dict[str, Any]) -> None:
    emulated = ", emulated" if facts["emulated"] else ""
    catalog = "" if facts["catalog"] == "lines" else f"catalog {facts['catalog']}, "
    console.print(
        f"{facts['path']}: {facts['media']}{emulated}, granularity {facts['granularity']}, "
        f"{catalog}{decimal(facts['bytes'])}, {decimal(facts['free_bytes'])} free, "
        f"{len(facts['versions'])} of {facts['slots']} slots in use",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def _table(*columns: str, right: Sequence[str] = ()) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def _add_row(table: Table, *cells: str, style: str = "") -> None:
    """Add a row of plain text: a name may hold what rich would take for markup."""
    table.add_row(*map(Text, cells), style=style)


def _version_table(versions: list[dict[str, Any]]) -> Table:
    numbers = ("step", "version", "generation", "extents", "bytes")
    table = _table(*numbers, "state", right=numbers)
    for index, version in enumerate(versions):
        words = ["latest"] if index == 0 else []
        words += ["damaged"] if version["damaged"] else []
        words += [f"pinned {version['pinned']}"] if version["pinned"] else []
        _add_row(
            table,
            *(str(version[name]) for name in numbers[:-1]),
            decimal(version["area_bytes"]),
            ", ".join(words),
        )
    return table


def _tensor_table(layers: list[dict[str, Any]]) -> Table:
    table = _table("tensor", "dtype", "shape", "bytes", "notes", right=("bytes",))
    for layer in layers:
        _add_row(table, layer["name"], "", "", decimal(layer["bytes"]), "", style="bold")
        for tensor in layer["tensors"]:
            shape = "x".join(map(str, tensor["shape"]))
            size = decimal(tensor["bytes"])
            dtype = tensor["dtype"]
            _add_row(table, f"  {tensor['name']}", dtype, shape, size, ", ".join(_notes(tensor)))
    return table


def _notes(tensor: dict[str, Any]) -> Iterator[str]:
    if tensor.get("subclass"):
        yield f"{tensor['subclass']}, of the tensors below"
    if tensor.get("shares"):
        yield f"in the extent of {tensor['shares']}"
    if tensor.get("persistent") is False:
        yield "not persistent"
    yield from (name for name in ("buffer", "packed", "uninitialised") if tensor.get(name))


def _verify_table(results: list[dict[str, Any]]) -> Table:
    table = _table("step", "version", "bytes", "result", right=("step", "version", "bytes"))
    for result in results:
        words = "ok" if result["ok"] else result["error"] or "damaged: " + ", ".join(result["bad"])
        style = "" if result["ok"] else "bold red"
        facts = (str(result["step"]), str(result["version"]), decimal(result["bytes"]))
        _add_row(table, *facts, words, style=style)
    return table


def _print_rows(title: str, rows: dict[str, str], notes: Sequence[str]) -> None:
    """Print what a thing was found to be, by its parts, and what is to be said of that."""
    console = Console()
    table = Table(box=SIMPLE_HEAD, show_header=False)
    for name, value in rows.items():
        _add_row(table, name, value)
    console.print(title, markup=False, highlight=False, soft_wrap=True)
    console.print(table)
    for line in notes:
        console.print(f"- {line}", markup=False, highlight=False, soft_wrap=True)


# Progress, on standard error, where somebody looks.


@contextmanager
def _progress(what: str, arguments: Arguments) -> Iterator[Report]:
    """Give a function that takes bytes done and bytes in all, and shows them as a bar."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(
        *columns,
        TransferSpeedColumn(),
        console=console,
        transient=True,
        disable=arguments.json or not console.is_terminal,
    ) as progress:
        task = progress.add_task(what, total=None)

        def report(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        yield report


@contextmanager
def _waiting(what: str, arguments: Arguments) -> Iterator[None]:
    """Show that something is under way whose end cannot be foreseen."""
    console = Console(stderr=True)
    if arguments.json or not console.is_terminal:
        yield
        return
    with console.status(what):
        yield
