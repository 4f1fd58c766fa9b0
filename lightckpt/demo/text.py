"""Text to train on that every machine has: the Python standard library's own source.

The text is a function of the installed Python alone: files of the top level, in order of name, cut
at a size. An example is a random cut from its own stretch of the text. The cut is drawn when the
example is asked for, from torch's global generator, so the order of examples, the cuts and the
model's dropout share one stream of random numbers: a resumed run sees the same text only if that
stream, and the loader's position in it, are restored exactly.
"""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

TEXT_BYTES_MAX = 1 << 20


def read_text(size_bytes_max: int = TEXT_BYTES_MAX) -> bytes:
    """Return the first *size_bytes_max* bytes of the standard library, files in order of name.

    Raises:
        FileNotFoundError: this Python has no source files beside it.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= size_bytes_max:
            return bytes(text[:size_bytes_max])
    if not text:
        raise FileNotFoundError(f"no Python source in {folder}: the demo has no text to train on")
    return bytes(text)


class Cuts(Dataset[Tensor]):
    """*count* examples of *size* bytes; example i is cut at random from stretch i of *text*."""

    def __init__(self, text: bytes, *, count: int, size: int) -> None:
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._count, self._size = count, size
        self._stretch = len(text) // count
        if self._stretch <= size:
            raise ValueError(f"{len(text)} bytes of text are too few for {count} cuts of {size}")

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Tensor:
        offset = int(torch.randint(self._stretch - self._size, ()))
        begin = index * self._stretch + offset
        return self._text[begin : begin + self._size].to(torch.int64)


def make_loader(*, context: int, batch: int, batches: int) -> DataLoader[Tensor]:
    """Return a shuffling loader with *batches* batches an epoch, shuffled anew in each."""
    cuts = Cuts(read_text(), count=batch * batches, size=context + 1)
    return DataLoader(cuts, batch_size=batch, shuffle=True)
