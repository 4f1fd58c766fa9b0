"""Series: what is known of a store from what its trainers said, and whether it holds that."""

from pathlib import Path

import trainer
from lightckpt._core import Store


class Series:
    """A store that lives are lost on: what has been acknowledged, and what may be newer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.acknowledged = 0
        self.trying: int | None = None

    def hear(self, message: tuple[object, ...]) -> None:
        kind, step = message
        if kind == "trying":
            self.trying = step
        else:
            assert kind == "ack", message
            assert step in (self.acknowledged, self.trying), f"{message}, {vars(self)}"
            self.acknowledged, self.trying = step, None

    def start_anew(self) -> None:
        self.path.unlink(missing_ok=True)
        self.acknowledged, self.trying = 0, None

    def check(self) -> bool:
        """Look at what a kill left; was the step that was being tried lost?"""
        if not self.path.exists():
            assert self.acknowledged == 0, vars(self)
            return self.trying is not None
        with Store(self.path, read_only=True, workers=1) as store:
            versions = store.versions()
            newest = versions[0].step if versions else 0
            assert newest in (self.acknowledged, self.trying), f"{newest}, {vars(self)}"
            for version in versions:
                assert not (wrong := trainer.difference(store, version)), wrong
        lost = self.trying is not None and newest != self.trying
        self.acknowledged, self.trying = newest, None
        return lost
