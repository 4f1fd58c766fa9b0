"""Checkpointer: what a training script sees. The state machine behind it is ``driver``."""

import atexit
import signal
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import nn
from torch.optim import Optimizer

from ._core import Info
from .archive import Archiver
from .decoration import Decoration
from .driver import Driver
from .errors import CheckpointError, CheckpointWarning, NotFoundError
from .flight import Record
from .hooks import glimpse_forward, watch_forward, watch_optimizer, weakly
from .loop import Loops
from .preempt import Preemption
from .settings import Settings, make_run, open_store
from .stats import Stats
from .ticket import Ticket

_END = object()


class Checkpointer:
    """Makes the state of a training run durable at the end of every iteration.

    Args:
        path: the store, a file; made if it is missing. On tmpfs (``/dev/shm``) it survives the
            process, on fsdax or a plain file the machine too (see ``lightckpt doctor``).
        model, optimizer, scheduler, scaler: one object, or a dict of them by name.
        extra: objects with ``state_dict`` and ``load_state_dict`` by name, a loader for example.
        tensors, generators: loose tensors and ``torch.Generator`` objects by name. A dict of
            tensors may be given others later: it is looked at anew at each boundary.
        rng: also capture torch's, Python's and numpy's global generators (CUDA's if in use).
        grads: also capture ``.grad``, and make versions in the middle of an accumulation; needed
            where optimizers accumulate over different numbers of iterations.
        every: iterations per version, or "auto": the fewest within *overhead* (a fraction).
        keep: versions that can be restored at every instant; at least 2 to fall back on one.
        mode: "overlap" (copy behind the next forward and backward), "stop" (copy while training
            waits), or "auto": measured on the run, the quicker one.
        busy: at a boundary with a version still being copied, "wait" for it or "drop" it.
        media: "auto", "pmem", "file", "tmpfs", "emulated" or "heap".
        catalog: where slots and manifests are, and so the commit: "lines" of the store, "pmemobj",
            a pool of libpmemobj in *path*.catalog, which one process at a time can open, or
            "auto": as the store has it, lines in a new one.
        size: bytes of a new store; None checks an estimate, and grows when the size is known.
        timeout: seconds that a guard, a copy or a commit may take.
        on_error: what a failing checkpoint does to training, "warn" or "raise"; ``wait`` and
            ``close`` always raise.
        allow_pickle: pickle state that has no safe encoding; restoring it then runs code.
        archive, archive_every: a folder, and after how many versions one is copied there.
        workers: copying threads; 0 takes one per usable core, at most 8.
        snapshot: how bytes leave a GPU: "direct" (its copy engine writes into the store, whose
            pages are pinned for that), "host" (through pinned staging), "device" (aside on the GPU
            first, which needs room there for all of it), or "auto": what works, measured.
        staging: bytes of pinned staging per GPU.

    Threads: any may call. Forked children: inert, every call raises ``ValueError``.

    Raises:
        NoSpaceError, BusyError, FormatError, AccessError: about the store; nothing was changed.
        TypeError, ValueError: about an argument.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        model: nn.Module | Mapping[str, nn.Module] | None = None,
        optimizer: Optimizer | Mapping[str, Optimizer] | None = None,
        scheduler: Any = None,
        scaler: Any = None,
        extra: Mapping[str, Any] | None = None,
        tensors: Mapping[str, torch.Tensor] | None = None,
        generators: Mapping[str, torch.Generator] | None = None,
        rng: bool = True,
        grads: bool = False,
        every: int | Literal["auto"] = 1,
        keep: int = 1,
        mode: str = "auto",
        busy: str = "wait",
        media: str = "auto",
        catalog: str = "auto",
        size: int | None = None,
        timeout: float = 60,
        on_error: str = "warn",
        allow_pickle: bool = False,
        overhead: float = 0.05,
        archive: str | Path | None = None,
        archive_every: int = 0,
        workers: int = 0,
        snapshot: str = "auto",
        staging: int = 128 << 20,
    ) -> None:
        if (archive is None) != (archive_every == 0) or archive_every < 0:
            raise ValueError(f"archive={archive!r} and archive_every={archive_every} go together")
        settings = Settings(
            every=every, keep=keep, mode=mode, busy=busy, media=media, catalog=catalog,
            size=size, timeout=timeout, on_error=on_error, overhead=overhead, workers=workers,
            snapshot=snapshot, staging=staging,
        )  # fmt: skip
        run = make_run(
            model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, extra=extra,
            tensors=tensors, generators=generators, rng=rng, grads=grads, allow_pickle=allow_pickle,
        )  # fmt: skip
        self.path = Path(path)
        self._driver = Driver(open_store(self.path, settings, run), run, settings)
        self._archiver = (
            Archiver(self._driver.store, Path(archive), archive_every) if archive else None
        )
        self._pinned: set[int] = set()  # versions, so that pinning twice is pinning once
        self._driver.durable_step = next(iter(self._driver.steps()), 0)
        self._step = 0
        self._loops = Loops(run)
        self._decoration = Decoration(self._driver, weakly(self, Checkpointer._end_pending))
        self._preemption = Preemption()
        self._handles = [h for name in run.optimizers for h in self._watch(name)]
        # A long evaluation must not keep the last step from becoming durable.
        poll = weakly(self._driver, Driver.poll)
        self._handles += [glimpse_forward(model, poll) for model in run.models.values()]
        self._at_exit = weakly(self, Checkpointer._end_quietly)
        atexit.register(self._at_exit)

    def _watch(self, name: str) -> list[Any]:
        def before(this: Checkpointer, closure: bool) -> None:
            if name in this._driver.run.given and this._decoration.is_pending():
                this._decoration.update_again(closure)
            this._driver.before_update(name)

        def after(this: Checkpointer) -> None:
            this._driver.after_update(name)

        optimizer = self._driver.run.optimizers[name]
        return watch_optimizer(optimizer, weakly(self, before), weakly(self, after))

    # -- boundaries ----------------------------------------------------------------------------

    def iterate(
        self, iterable: Iterable[Any], start: int = 0, epochs: int | None = None
    ) -> Iterator[tuple[int, Any]]:
        """Yield (step, batch) from *iterable*; asking for the next one ends an iteration.

        After ``restore`` it goes on where the version stood, in the middle of an epoch if need be:
        generators are set to the epoch's beginning, the batches already taken are drawn again, and
        the generators get their values of the boundary. A ``break`` or an exception ends no
        iteration; ``mark`` in the loop's body would end one more.

        A program may iterate several sources with ``epochs``: started again, it makes all these
        calls, and those before the one that the version is of yield nothing. A loop of your own
        over epochs, which begins at the right one, leaves it out.

        Args:
            start: iterations already done: what ``restore`` returned.
            epochs: how often to go through *iterable*; None: once, or the rest of once.

        Raises:
            ValueError: *start* is not the step that was restored; or *iterable* can be gone through
                once only, and this process took from it before it went back.
        """
        self._check_open()
        if start != self._step:
            raise ValueError(f"start={start}, but this run stands at step {self._step}")
        batches = self._loops.begin(iterable, epochs)
        self._decoration.explicit = True
        return self._iterate(batches)

    def _iterate(self, batches: Iterator[Any]) -> Iterator[tuple[int, Any]]:
        while (batch := next(batches, _END)) is not _END:
            yield self._step, batch
            self._mark()

    def mark(self) -> Ticket:
        """End an iteration by hand; not in the body of ``iterate``, which ends them itself.

        It makes a version if an optimizer was stepped, a captured tensor was changed otherwise
        with no gradient waiting for an update, or ``grads`` is set; not if the scheduler or an
        extra alone moved. Optimizers may step at once, their guards wait; other edits wait for
        ``Ticket.wait``.
        """
        self._decoration.explicit = True
        return self._mark()

    def _mark(self) -> Ticket:
        with self._driver.checked().lock:
            self._check_open()
            ticket, asked = self._boundary()
        if asked:
            self._preemption.finish(self._driver)
        return ticket

    def _end_pending(self) -> None:
        with self._driver.lock:
            # Since a hook saw one to end, another thread may have ended it, or closed.
            asked = self._decoration.is_pending() and self._boundary()[1]
        if asked:
            self._preemption.finish(self._driver)

    def _boundary(self) -> tuple[Ticket, bool]:
        """End an iteration; return also whether a signal asks to finish once the lock is free."""
        self._step += 1
        self._loops.went_on()
        self._decoration.give_way()
        asked = self._preemption.asked
        flight, skipped = self._driver.boundary(self._step, self._loops.state, anyway=asked)
        if self._archiver is not None and flight is not None:
            self._archiver.look(self._step)
        return Ticket(self._driver, self._step, flight, skipped), asked

    def finish_on(self, *signals: int) -> None:
        """Let *signals* end the run in order: SIGTERM, unless others are named.

        When one comes, the iteration in progress goes on to its end. There its version is made,
        due or not, and waited for; then the signal does what it would have done before this call:
        end the process, nothing, or what a handler of yours does. ``close`` takes handlers out.

        Raises:
            ValueError: not called in the main thread, or a handler is not Python's.
            OSError: a signal cannot be caught.
        """
        self._check_open()
        self._preemption.watch(signals or (signal.SIGTERM,))

    def decorate(self, step: Any) -> Any:
        """Checkpoint after ``step``, an optimizer's step method, and return that same method.

        Without ``iterate`` or ``mark``, an iteration is an update, or one that a scaler skipped. It
        ends at the next forward call of a registered model in training mode, or the next step that
        is given a closure. Random generators are captured as the step returns, and so are extras
        that batches are drawn from: what can be iterated or indexed (but for modules and mappings)
        or has a generator as an attribute. That is exact if what else lies between update and
        forward belongs to the iteration that ends, and draws no random numbers.

        Args:
            step: the method, however wrapped; or the optimizer.

        Raises:
            TypeError: *step* is no optimizer's step method.
            ValueError: the optimizer, or every model, is unknown to this checkpointer.
        """
        if self._decoration.start(step):
            forward = weakly(self._decoration, Decoration.entered)
            self._handles += [watch_forward(m, forward) for m in self._driver.run.models.values()]
        return step

    # -- restoring -----------------------------------------------------------------------------

    def restore(self, step: int | None = None) -> int:
        """Bring every registered object to a version's state, and return the iterations it had.

        Everything is checked before anything is changed. Where data turn out to be damaged the
        next older version is taken, and a warning says so. Versions newer than the one restored
        are retired once it is in place.

        Args:
            step: which; None takes the newest. A new store returns 0 and changes nothing.

        Raises:
            NotFoundError: there is no version of *step*; the message lists those there are.
            StructureError: the store holds another run's state; the message names what differs.
            CorruptError, FormatError: no version is whole; the message names what is damaged.
        """
        self._check_open()
        self._step, host = self._driver.restore(step)
        self._loops.restored(host.get("loop"), host.get("rng", {}))
        return self._step

    # -- looking -------------------------------------------------------------------------------

    @property
    def latest(self) -> int:
        """The newest step known to be durable; 0 if there is none."""
        return self._driver.durable_step

    @property
    def stats(self) -> Stats:
        return self._driver.stats

    @property
    def timeline(self) -> Iterable[Record]:
        """The latest versions' times, oldest first; see :class:`Record`."""
        return self._driver.timeline

    def info(self) -> Info:
        """Return facts about the store: media, granularity, sizes, counters."""
        return self._driver.checked().store.info()

    def why(self) -> dict[str, Any]:
        """Say in words what was chosen, and which tensors are copied at the boundary and why."""
        return self._driver.checked().why()

    def steps(self) -> list[int]:
        """Return the steps that can be restored now, newest first."""
        self._check_open()
        return self._driver.steps()

    def pin(self, step: int, *, pinned: bool = True) -> None:
        """Keep the version of *step* until it is unpinned or this process ends.

        Raises:
            NotFoundError: there is none.
        """
        self._check_open()
        with self._driver.lock:
            for version in self._driver.store.versions():
                if version.step == step and not version.damaged:
                    if pinned != (version.version in self._pinned):
                        self._driver.store.pin(version.version, pinned=pinned)
                        self._pinned ^= {version.version}
                    return
            raise NotFoundError(f"there is no version of step {step}, only of {self.steps()}")

    # -- ends ----------------------------------------------------------------------------------

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the newest version is durable, and return the newest durable step.

        On another thread than the one that trains it waits for that one's next update, boundary
        or ``wait``: training must not wait for a thread that is in here.

        Raises:
            CheckpointError: a version since the last ``wait`` failed; the message says why.
            WaitTimeoutError: not durable within *timeout* seconds (None: the checkpointer's).
        """
        self._check_open()
        return self._driver.land(timeout)

    def close(self) -> None:
        """Wait until the last version is durable, and release the store. Twice is harmless.

        Raises:
            CheckpointError: as ``wait``; the store is released all the same.
        """
        self._close(ended=True)

    def _close(self, *, ended: bool) -> None:
        """Close; *ended* says that training came to the end of an iteration, not to an error."""
        driver = self._driver.checked()
        with driver.lock:
            if driver.store.closed:
                return
            try:
                if ended and self._decoration.is_pending():
                    self._mark()  # no forward will come to end the last iteration
                driver.land(anywhere=True)
                if self._archiver is not None:
                    self._archiver.close()
            finally:
                for handle in self._handles:
                    handle.remove()
                atexit.unregister(self._at_exit)
                driver.release()
                self._preemption.release()

    def _end_quietly(self) -> None:
        """At interpreter exit: what has been copied becomes durable; errors only warn."""
        if not self._driver.is_here():
            return
        try:
            self._close(ended=False)
        except CheckpointError as error:
            warnings.warn(f"at exit: {error}", CheckpointWarning, stacklevel=1)

    def __del__(self) -> None:
        if hasattr(self, "_at_exit"):
            self._end_quietly()

    def _check_open(self) -> None:
        if self._driver.checked().store.closed:
            raise ValueError(f"the checkpointer of {self.path} is closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        # An exception left an iteration unfinished: it ends none, but the version before it counts.
        # One that ends a forked child, such as SystemExit, ends it as it would without us.
        try:
            self._close(ended=error is None)
        except (CheckpointError, ValueError):
            if error is None:
                raise


def protect(
    optimizer: Optimizer, path: str | Path, *, model: nn.Module, **options: Any
) -> Checkpointer:
    """Checkpoint *model* and *optimizer* after every step, in one line; see ``decorate``.

    Args:
        options: more arguments of :class:`Checkpointer`.
    """
    checkpointer = Checkpointer(path, model=model, optimizer=optimizer, **options)
    checkpointer.decorate(optimizer)
    return checkpointer
