"""The models that are trained, as their papers have them, with what they are trained on.

Sizes are the real ones; the batch is small, so that two cores do a step in a second or so: that is
what makes checkpointing hard, since the time to hide it behind grows with the batch and the state
does not. Optimizers are the usual ones, in torch's fused form, which is the quickest on a CPU.

Text is the Python library's own source, a token per byte. Images are scikit-learn's digits, resized
to what the model takes; without scikit-learn they are random, and the line says so. Weights are as
the libraries initialise them from a seed: nothing is downloaded.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightckpt.demo.text import read_text

Batch = tuple[Tensor, Tensor]
CPU_PRECISION, GPU_PRECISION = "float32", "float32 parameters, bfloat16 autocast"
TEXT_MODELS = ("gpt2", "bert", "small")
MASK_TOKEN, MASKED_SHARE, IGNORED = 103, 0.15, -100


@dataclass(frozen=True)
class Shape:
    """What is fed to a model: ``size`` is pixels a side, or tokens."""

    batch: int
    size: int


@dataclass
class Workload:
    """A training run; ``step`` is one iteration, and ``phases`` when its parts ended, in ns."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss_of: Callable[[nn.Module, Batch], Tensor]
    draw: Callable[[torch.Generator], Batch]
    generator: torch.Generator
    facts: dict[str, Any]
    device: str = "cpu"
    phases: list[tuple[int, int, int, int]] = field(default_factory=list)

    def step(self, before_update: Callable[[], Any] = lambda: None) -> None:
        """Train on the next batch; *before_update* is called when the gradients are there."""
        begin = time.monotonic_ns()
        batch = tuple(part.to(self.device) for part in self.draw(self.generator))
        loss = self.loss_of(self.model, batch)
        loss.backward()
        backward = time.monotonic_ns()
        before_update()
        waited = time.monotonic_ns()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.phases.append((begin, backward, waited, time.monotonic_ns()))

    def state(self) -> dict[str, Any]:
        """Return what a careful script saves, and what a restored run needs."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": self.generator.get_state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Bring *state* back, as ``state`` returned it."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["random"])


# Images.


@cache
def _declared() -> torch.library.Library | None:
    """Make torchvision importable beside a torch without CUDA.

    The release for torch 2.13 that the registry has is built with CUDA. Beside a torch without
    CUDA its compiled operators do not load, which the models here do without; but its import, and
    so that of transformers, wants two of them to be declared. Declared they then are, by name only,
    for as long as what is returned lives.
    """
    if torch.version.cuda is not None:
        return None
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def load_libraries(name: str = "") -> None:
    """Import what model *name*, or any, is made with; takes seconds, the first time."""
    _declared()
    if not name or name not in TEXT_MODELS:
        import torchvision.models  # noqa: F401
    if not name or name in TEXT_MODELS:
        from transformers import BertForMaskedLM, GPT2LMHeadModel  # noqa: F401


def _images(shape: Shape) -> tuple[Callable[[torch.Generator], Batch], str]:
    """Return what draws a batch of images with their classes, and what they are."""
    size = (shape.size, shape.size)
    if find_spec("sklearn") is None:

        def synthetic(generator: torch.Generator) -> Batch:
            images = torch.randn(shape.batch, 3, *size, generator=generator)
            return images, torch.randint(10, (shape.batch,), generator=generator)

        return synthetic, "seeded random images: scikit-learn is not installed"
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
    classes = torch.tensor(digits.target, dtype=torch.int64)

    def draw(generator: torch.Generator) -> Batch:
        chosen = torch.randint(len(images), (shape.batch,), generator=generator)
        large = functional.interpolate(images[chosen], size, mode="bilinear")
        return large.expand(-1, 3, -1, -1).contiguous(), classes[chosen]

    return draw, "scikit-learn's digits, resized"


def _classify(model: nn.Module, batch: Batch) -> Tensor:
    images, classes = batch
    scores = model(images)
    if isinstance(scores, tuple):  # Inception: the second head weighs 0.4, as in its paper
        main = functional.cross_entropy(scores[0], classes)
        return main + 0.4 * functional.cross_entropy(scores[1], classes)
    return functional.cross_entropy(scores, classes)


def _vision(name: str, shape: Shape, *, smoke: bool, device: str) -> Workload:
    import torchvision.models

    classes = 10 if smoke else 1000
    # Inception's second head wants images of full size, so the tiny one has none.
    extra = {"init_weights": True, "aux_logits": not smoke} if name == "inception_v3" else {}
    make = getattr(torchvision.models, name)
    model = make(weights=None, num_classes=classes, **extra)
    if smoke and name in TINY_ENDS:  # most of their bytes are in three layers at the end
        model.classifier = nn.Linear(TINY_ENDS[name], classes)
    model = model.to(device)
    draw, source = _images(shape)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-4, fused=True
    )
    return _workload(name, model, optimizer, _classify, draw, shape, source, device)


# Text.


def _text(shape: Shape, *, masked: bool) -> Callable[[torch.Generator], Batch]:
    """Return what draws a batch of byte tokens and what is to be predicted."""
    text = torch.frombuffer(bytearray(read_text()), dtype=torch.uint8)

    def draw(generator: torch.Generator) -> Batch:
        begins = torch.randint(len(text) - shape.size, (shape.batch,), generator=generator)
        tokens = torch.stack([text[at : at + shape.size] for at in begins.tolist()]).long()
        if not masked:
            return tokens, tokens
        tokens = tokens + 1000  # above BERT's special tokens
        hidden = torch.rand(tokens.shape, generator=generator) < MASKED_SHARE
        hidden[:, 0] = True  # or a batch without any has no loss
        return tokens.masked_fill(hidden, MASK_TOKEN), tokens.masked_fill(~hidden, IGNORED)

    return draw


def _language(model: nn.Module, batch: Batch) -> Tensor:
    tokens, wanted = batch
    return model(input_ids=tokens, labels=wanted).loss


def _transformer(name: str, model: nn.Module, shape: Shape, *, masked: bool, device: str):
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    source = "the Python library's source, a token per byte"
    draw = _text(shape, masked=masked)
    return _workload(name, model, optimizer, _language, draw, shape, source, device)


def _gpt2(name: str, shape: Shape, config: dict[str, int], device: str) -> Workload:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(loss_type="ForCausalLMLoss", **config))
    return _transformer(name, model, shape, masked=False, device=device)


def _bert(name: str, shape: Shape, config: dict[str, int], device: str) -> Workload:
    from transformers import BertConfig, BertForMaskedLM

    model = BertForMaskedLM(BertConfig(**config))
    return _transformer(name, model, shape, masked=True, device=device)


def _workload(name, model, optimizer, loss_of, draw, shape, source, device) -> Workload:
    model.train()
    parameters = list(model.parameters())
    facts = {
        "parameters": sum(p.numel() for p in parameters),
        "parameter_tensors": len(parameters),
        "optimizer": f"{type(optimizer).__name__}, fused",
        "precision": GPU_PRECISION if device == "cuda" else CPU_PRECISION,
        "batch": shape.batch,
        "size": shape.size,
        "input": source,
    }
    if device == "cuda":
        loss_of = under_autocast(loss_of)
    generator = torch.Generator()
    generator.manual_seed(torch.initial_seed())
    return Workload(name, model, optimizer, loss_of, draw, generator, facts, device)


# What comes out of the last pooling.
TINY_ENDS = {"vgg16": 512 * 7 * 7, "alexnet": 256 * 6 * 6}


def under_autocast(loss_of: Callable[[nn.Module, Batch], Tensor]) -> Any:
    """Return *loss_of* computing in bfloat16 where autocast lets it."""

    def wrapped(model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return loss_of(model, batch)

    return wrapped


BERT_LARGE = {
    "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
    "intermediate_size": 4096,
}  # fmt: skip
BERT_TINY = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 64, "vocab_size": 1400, "max_position_embeddings": 64,
}  # fmt: skip
GPT2_SMALL = {"n_layer": 5, "n_embd": 256, "n_head": 4, "n_positions": 128, "vocab_size": 256}
GPT2_TINY = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 64, "vocab_size": 256}

# (batch, size) on a CPU, of the tiny variant, and on a GPU.
SHAPES = {
    "resnet18": (Shape(4, 224), Shape(2, 32), Shape(128, 224)),
    "vgg16": (Shape(1, 224), Shape(1, 32), Shape(64, 224)),
    "inception_v3": (Shape(2, 299), Shape(2, 96), Shape(64, 299)),
    "alexnet": (Shape(16, 224), Shape(2, 64), Shape(256, 224)),
    "gpt2": (Shape(1, 32), Shape(1, 16), Shape(8, 512)),
    "bert": (Shape(1, 32), Shape(1, 16), Shape(8, 512)),
    "small": (Shape(4, 64), Shape(1, 16), Shape(32, 128)),
}


def build(name: str, *, device: str = "cpu", smoke: bool = False, seed: int = 0) -> Workload:
    """Return the training run *name*, made from *seed* alone.

    Args:
        smoke: a tiny variant that only shows that all of it runs. The four of torchvision keep
            their layers, have smaller images and ten classes, and two of them one layer at the end.
    """
    load_libraries(name)
    torch.manual_seed(seed)
    cpu, tiny, gpu = SHAPES[name]
    shape = tiny if smoke else gpu if device == "cuda" else cpu
    if name == "gpt2":
        return _gpt2(name, shape, GPT2_TINY if smoke else {}, device)
    if name == "small":
        return _gpt2(name, shape, GPT2_TINY if smoke else GPT2_SMALL, device)
    if name == "bert":
        return _bert(name, shape, BERT_TINY if smoke else BERT_LARGE, device)
    return _vision(name, shape, smoke=smoke, device=device)
