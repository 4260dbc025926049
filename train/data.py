"""Data sets, and the loaders that hand each rank its share of every batch.

`--data MODULE:CALLABLE` names a function without arguments that returns two data sets, to train on and to test with.
Each is a map-style one, as torch.utils.data has them: `len(it)`, and `it[i]` is (sample, label): a tensor of one shape
for all, and a number from 0. Images of uint8 are scaled to [-1, 1]. What has `.classes` says how many labels there are.
Random numbers may be drawn (torch's, `random`'s): a batch has a seed of its own, so that a resumed run draws the same.
"""

import gzip
import importlib
import math
import random
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from click import UsageError
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset, default_collate

from ckpt_tools.errors import CkptError
from ckpt_tools.torch import load as load_checkpoint
from train.config import Config, called, refuse, refusing
from train.parallel import World

CLASSES = 10
IDX = {"mnist": "MNIST", "fashion-mnist": "FashionMNIST"}  # torchvision's name of the folder


def load(name: str, folder: Path = Path("data"), *, shape: str = "1x28x28", samples: int = 12_000) -> tuple[Any, Any]:
    """The training and the held-out test images of a data set, whose files are in `folder`.

    Ours are TensorDatasets of pixels (N, channels, height, width) uint8 and labels (N,) int64. `shape` (CxHxW) and `samples`
    are those of `synthetic`. Raises UsageError, with what to install or where to put the files, where it is not to be had.
    """
    if ":" in name:
        sets: tuple[Any, Any] = called("--data", name)
        good = isinstance(sets, tuple) and len(sets) == 2 and all(len(each) > 0 and len(each[0]) == 2 for each in sets)
        refuse(not good, f"--data {name} returns no two data sets of (sample, label), to train on and to test with")
        return sets
    if name == "digits":
        return digits()
    if name == "synthetic":
        return synthetic(shape, samples)
    where = "cifar-10-batches-py/data_batch_1" if name == "cifar10" else f"{IDX[name]}/raw/train-images-idx3-ubyte"
    missing = f"{folder} has no whole {name}: put {where} and its companions there; --data digits works now"
    with refusing(missing, OSError, EOFError, ValueError, LookupError, TypeError, AttributeError, CkptError):
        return cifar(folder) if name == "cifar10" else (idx_pair(folder, name, "train"), idx_pair(folder, name, "t10k"))


def digits() -> tuple[TensorDataset, TensorDataset]:
    """scikit-learn's 1,797 images of 8 x 8 (values 0 to 16), a fixed fifth of them, drawn at random, held out."""
    with refusing("--data digits needs scikit-learn: pip install -e '.[train]'", ImportError):
        source = importlib.import_module("sklearn.datasets").load_digits()
    pixels = (torch.as_tensor(source.images) * (255 / 16)).round().to(torch.uint8).unsqueeze(1)
    return held_out(pixels, torch.as_tensor(source.target, dtype=torch.int64))


def synthetic(shape: str, samples: int) -> tuple[TensorDataset, TensorDataset]:
    """`samples` images of `shape` (CxHxW): ten fixed random patterns under noise, for timing and for tests."""
    try:
        channels, height, width = (int(part) for part in shape.split("x"))
    except ValueError:
        raise UsageError(f"--shape is CHANNELSxHEIGHTxWIDTH, such as 3x32x32, not {shape}") from None
    refuse(min(channels, height, width) < 1, f"--shape {shape} has no pixels")
    draws = torch.Generator().manual_seed(0)
    labels = torch.randint(CLASSES, (samples,), generator=draws)
    patterns = torch.randint(0, 128, (CLASSES, channels, height, width), dtype=torch.uint8, generator=draws)
    noise = torch.randint(0, 128, (samples, channels, height, width), dtype=torch.uint8, generator=draws)
    return held_out(noise.add_(patterns[labels]), labels)


def held_out(pixels: Tensor, labels: Tensor) -> tuple[TensorDataset, TensorDataset]:
    """Four fifths to train on and one to test with; the same split in every run, whatever its seed."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, rest = order[: len(order) // 5], order[len(order) // 5 :]
    return TensorDataset(pixels[rest], labels[rest]), TensorDataset(pixels[test], labels[test])


def idx_pair(folder: Path, name: str, part: str) -> TensorDataset:
    """Images and labels of `train` or `t10k`, from where torchvision unpacks them or from `folder` itself, also as .gz."""
    pixels, labels = idx(folder, name, f"{part}-images-idx3-ubyte"), idx(folder, name, f"{part}-labels-idx1-ubyte")
    return TensorDataset(pixels.unsqueeze(1), labels.to(torch.int64))


def idx(folder: Path, data: str, name: str) -> Tensor:
    """A file of the IDX format: 0, 0, 8 for bytes, the number of dimensions, each as a big-endian int32, the bytes."""
    places = (folder / IDX[data] / "raw" / name, folder / name)
    path = next(
        each
        for place in places
        for each in (place, place.with_name(f"{name}.gz"))
        if each.exists() or place is each is places[-1]
    )
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    head = 4 + 4 * content[3]
    sizes = [int.from_bytes(content[at : at + 4], "big") for at in range(4, head, 4)]
    refuse(content[:3] != b"\0\0\x08" or len(content) - head != math.prod(sizes), f"{path} is no whole IDX file of bytes")
    return torch.frombuffer(bytearray(content[head:]), dtype=torch.uint8).reshape(sizes)


def cifar(folder: Path) -> tuple[TensorDataset, TensorDataset]:
    """The six pickles of CIFAR-10, read as ckpt reads them: nothing in them is run. A row is 3 x 32 x 32 bytes."""
    place = folder / "cifar-10-batches-py"
    files = [(place if place.is_dir() else folder) / name for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")]
    sets = [
        (content["data"].reshape(-1, 3, 32, 32), torch.tensor(content["labels"])) for content in map(load_checkpoint, files)
    ]
    pixels, labels = (torch.cat(each) for each in zip(*sets[:5], strict=True))
    return TensorDataset(pixels, labels), TensorDataset(*sets[5])


def fitted(images: Tensor, shape: tuple[int, ...] | None, darkest: int = -1) -> Tensor:
    """Images (N, C, H, W) of (N, *shape), uint8 as floats in [darkest, 1]: grey is repeated, colours are averaged to grey.

    Without a shape they keep their own.
    """
    images = images.float().div_(255 / (1 - darkest)).add_(darkest) if images.dtype == torch.uint8 else images
    if shape and images.shape[1] != shape[0]:
        images = images.mean(1, keepdim=True).expand(-1, shape[0], -1, -1)
    if shape and images.shape[2:] != shape[1:]:
        images = F.interpolate(images, shape[1:], mode="bilinear", align_corners=False)
    return images


class Batch(NamedTuple):
    """Which samples are a rank's share of a batch, and the seed of what is drawn to make it."""

    samples: list[int]
    seed: str


class Batches(Sampler[Batch]):
    """This rank's share of each batch of an epoch: of every W samples in a row, W ranks have one each.

    All is decided by the run's seed, the epoch and the step alone. So a resumed epoch begins at the step that it stopped
    before, without making the batches before it, and with the very batch that would have come. The last batch may be
    smaller, and the ranks' shares of it differ by one: no sample is repeated, none is left out.
    """

    def __init__(self, total: int, config: Config, world: World, *, shuffle: bool) -> None:
        self.total, self.whole, self.world, self.shuffle, self.seed = total, config.batch_size, world, shuffle, config.seed
        self.most, self.epoch, self.step = config.grad_accum, 0, 0

    def begin(self, epoch: int, step: int = 0) -> None:
        """The next pass is this epoch (another order in each, the same one on every rank), from `step` on."""
        self.epoch, self.step = epoch, step

    def size(self, step: int) -> int:
        """How many samples the batch has, over all ranks."""
        return min(self.whole, self.total - step * self.whole)

    def passes(self, step: int) -> int:
        """In how many it is cut, on every rank: `--grad-accum`, fewer where a rank would have no samples for one."""
        return max(1, min(self.most, self.size(step) // self.world.size))

    def __len__(self) -> int:
        return -(-self.total // self.whole)  # of a whole epoch

    def __iter__(self) -> Iterator[Batch]:
        draws = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.total, generator=draws).tolist() if self.shuffle else range(self.total)
        for step in range(self.step, len(self)):
            share = order[step * self.whole : (step + 1) * self.whole][self.world.rank :: self.world.size]
            yield Batch(list(share), f"{self.seed} {self.world.rank} {self.epoch} {step}")


class Prepared(Dataset[tuple[Tensor, Tensor]]):
    """A data set by whole batches, as the network takes them. Cut at once where that is possible, which is much faster."""

    def __init__(self, samples: Any, shape: tuple[int, ...] | None, darkest: int) -> None:
        self.samples, self.shape, self.darkest = samples, shape, darkest

    def __getitem__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        if isinstance(self.samples, TensorDataset):
            images, labels = self.samples[torch.tensor(batch.samples, dtype=torch.int64)]  # a list is ten times slower
        else:
            with torch.random.fork_rng(devices=[]):
                random.seed(batch.seed)
                torch.default_generator.manual_seed(random.getrandbits(63))  # torch.manual_seed would seed the GPUs too
                # A rank without a sample in the last batch takes part with none of one.
                chosen = [self.samples[i] for i in batch.samples or [0]]
                images, labels = (part[: len(batch.samples)] for part in default_collate(chosen))
        return fitted(images, self.shape, self.darkest), labels


@dataclass
class InProcess:
    """A DataLoader without workers, without its thirty microseconds a batch."""

    prepared: Prepared
    batches: Batches

    def __iter__(self) -> Iterator[Any]:
        return map(self.prepared.__getitem__, self.batches)


class Split(NamedTuple):
    """The loader of this rank's shares, what decides them, and one sample as a batch of one."""

    loader: Iterable[tuple[Tensor, Tensor]]
    batches: Batches
    first: Tensor


def split(samples: Any, shape: tuple[int, ...] | None, darkest: int, config: Config, world: World, *, shuffle: bool) -> Split:
    """This rank's share of each batch: together they are the very batch that a single process would see."""
    prepared, batches = Prepared(samples, shape, darkest), Batches(len(samples), config, world, shuffle=shuffle)
    if config.workers == 0:
        return Split(InProcess(prepared, batches), batches, prepared[Batch([0], "")][0])
    loader = DataLoader(
        prepared,
        batch_size=None,  # an index is a batch
        sampler=batches,
        num_workers=config.workers,
        persistent_workers=True,
        pin_memory=world.device.type == "cuda",
        generator=torch.Generator(),  # its own, so that a loader does not draw from the run's
        worker_init_fn=deaf,
    )
    return Split(loader, batches, prepared[Batch([0], "")][0])


def deaf(worker: int) -> None:
    """A loader's worker leaves Ctrl-C to the training process, and dies of SIGTERM at once."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def refuse_lone_samples(network: nn.Module, total: int, config: Config, world: World) -> None:
    """Raises UsageError where batch normalisation would have to take the statistics of a single sample."""
    batches = Batches(total, config, world, shuffle=False)
    last = len(batches) - 1
    sizes = [
        len(part)
        for step in {0, last}
        for share in {batches.size(step) // world.size, -(-batches.size(step) // world.size)}
        for part in chain(*(each.chunk(len(world.devices)) for each in torch.arange(share).tensor_split(batches.passes(step))))
    ]
    normed = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in network.modules())
    lone = f"--batch-size {config.batch_size} leaves of {total} images a batch of one, and {config.model} normalises batches"
    refuse(normed and min(sizes) < 2, f"{lone} of two or more: choose another")
