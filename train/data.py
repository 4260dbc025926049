"""Data sets, and the batches that each rank has its share of.

`--data MODULE:CALLABLE` names a function without arguments that returns two data sets, to train on and to test with.
Each is a map-style one, as torch.utils.data has them: `len(it)`, and `it[i]` is (sample, label): a tensor of one shape
for all, and a number from 0. Images of uint8 are scaled to [-1, 1]. What has `.classes` says how many labels there are.
Random numbers may be drawn (torch's, `random`'s, numpy's): each batch is drawn with a seed of its own.
"""

import gzip
import importlib
import math
import random
import signal
import sys
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

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
        train, test = called("--data", name)
        return train, test
    if name == "digits":
        with refusing("--data digits needs scikit-learn: pip install -e '.[train]'", ImportError):
            source = importlib.import_module("sklearn.datasets").load_digits()
        pixels = (torch.as_tensor(source.images) * (255 / 16)).round().to(torch.uint8).unsqueeze(1)
        return held_out(pixels, torch.as_tensor(source.target, dtype=torch.int64))
    if name == "synthetic":
        return synthetic([int(part) for part in shape.split("x")], samples)
    where = "cifar-10-batches-py/data_batch_1" if name == "cifar10" else f"{IDX[name]}/raw/train-images-idx3-ubyte"
    missing = f"{folder} has no whole {name}: put {where} and its companions there; --data digits works now"
    with refusing(missing, OSError, EOFError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, CkptError):
        return cifar(folder) if name == "cifar10" else (idx_pair(folder, name, "train"), idx_pair(folder, name, "t10k"))


def synthetic(shape: list[int], samples: int) -> tuple[Any, Any]:
    """`samples` images of `shape`: ten fixed random patterns under noise, for timing and for tests."""
    draws = torch.Generator().manual_seed(0)
    labels = torch.randint(CLASSES, (samples,), generator=draws)
    patterns = torch.randint(0, 128, (CLASSES, *shape), dtype=torch.uint8, generator=draws)
    noise = torch.randint(0, 128, (samples, *shape), dtype=torch.uint8, generator=draws)
    return held_out(noise.add_(patterns[labels]), labels)


def held_out(pixels: Tensor, labels: Tensor) -> tuple[Any, Any]:
    """Four fifths to train on and one to test with, drawn at random; the same split in every run, whatever its seed."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, rest = order[: len(order) // 5], order[len(order) // 5 :]
    return TensorDataset(pixels[rest], labels[rest]), TensorDataset(pixels[test], labels[test])


def idx_pair(folder: Path, name: str, part: str) -> TensorDataset:
    """Images and labels of `train` or `t10k`, from where torchvision unpacks them or from `folder` itself, also as .gz."""
    raw = folder / IDX[name] / "raw"
    place = raw if raw.is_dir() else folder
    return TensorDataset(idx(place / f"{part}-images-idx3-ubyte").unsqueeze(1), idx(place / f"{part}-labels-idx1-ubyte").long())


def idx(path: Path) -> Tensor:
    """A file of the IDX format: 0, 0, 8 for bytes, the number of dimensions, each as a big-endian int32, the bytes."""
    zipped = path.with_name(f"{path.name}.gz")
    content = gzip.decompress(zipped.read_bytes()) if zipped.exists() and not path.exists() else path.read_bytes()
    sizes = [int.from_bytes(content[at : at + 4], "big") for at in range(4, 4 + 4 * content[3], 4)]
    pixels = bytearray(content[4 + 4 * len(sizes) :])
    refuse(content[:3] != b"\0\0\x08" or len(pixels) != math.prod(sizes), f"{path} is no whole IDX file of bytes")
    return torch.frombuffer(pixels, dtype=torch.uint8).reshape(sizes)


def cifar(folder: Path) -> tuple[Any, Any]:
    """The six pickles of CIFAR-10, read as ckpt reads them: nothing in them is run. A row is 3 x 32 x 32 bytes."""
    unpacked = folder / "cifar-10-batches-py"
    place = unpacked if unpacked.is_dir() else folder
    files = [load_checkpoint(place / name) for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")]
    sets = [TensorDataset(file["data"].reshape(-1, 3, 32, 32), torch.tensor(file["labels"])) for file in files]
    pixels, labels = (torch.cat(each) for each in zip(*(part.tensors for part in sets[:5]), strict=True))
    return TensorDataset(pixels, labels), sets[5]


def fitted(images: Tensor, shape: tuple[int, ...] | None = None, darkest: int = -1) -> Tensor:
    """Images (N, C, H, W) of (N, *shape), uint8 as floats in [darkest, 1]: grey is repeated, colours are averaged to grey.

    Without a shape they keep their own.
    """
    images = images.float().div_(255 / (1 - darkest)).add_(darkest) if images.dtype == torch.uint8 else images
    if shape and images.shape[1] != shape[0]:
        images = images.mean(1, keepdim=True).expand(-1, shape[0], -1, -1)
    if shape and images.shape[2:] != shape[1:]:
        images = F.interpolate(images, shape[1:], mode="bilinear", align_corners=False)
    return images


def seed(*place: object, devices: Iterable[torch.device] = ()) -> None:
    """Seeds all random generators with where the run is: none of them has to be saved, and a resumed run draws the same."""
    number = zlib.crc32(repr(place).encode())
    torch.default_generator.manual_seed(number)  # torch.manual_seed takes as long as a small step
    for device in devices:
        if device.type == "cuda":
            torch.cuda.default_generators[device.index].manual_seed(number)
    random.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)


class Batches(Dataset[tuple[Tensor, Tensor]]):
    """This rank's share of each batch, by (epoch, step): of every W samples in a row, W ranks have one each.

    All is decided by the run's seed, the epoch and the step alone. So a resumed epoch begins at the step that it stopped
    before, without making the batches before it, and with the very batch that would have come. All batches to train on are
    whole: each epoch leaves out the few samples that are left in its order. None is left out of a test.
    """

    def __init__(self, samples: Any, fit: Callable[[Tensor], Tensor], config: Config, world: World, *, train: bool) -> None:
        self.samples, self.fit, self.total = samples, fit, len(samples)
        self.config, self.rank, self.ranks, self.train = config, world.rank, world.size, train
        self.epoch, self.shares = -1, torch.arange(self.total).split(config.batch_size)
        self.places: list[tuple[int, int]] = []
        self.loader: DataLoader[Any] | None = None  # without workers it would only take its thirty microseconds a batch
        if config.workers:
            self.loader = DataLoader(
                self, batch_size=None, sampler=self.places, num_workers=config.workers, persistent_workers=True,
                pin_memory=world.device.type == "cuda", worker_init_fn=deaf, generator=torch.Generator(),
            )  # fmt: skip

    def __getitem__(self, place: tuple[int, int]) -> tuple[Tensor, Tensor]:
        epoch, step = place
        if self.train and epoch != self.epoch:
            draws = torch.Generator().manual_seed(self.config.seed + epoch)
            self.epoch, self.shares = epoch, torch.randperm(self.total, generator=draws).split(self.config.batch_size)
        share = self.shares[step] if self.ranks == 1 else self.shares[step][self.rank :: self.ranks]
        if isinstance(self.samples, TensorDataset):
            images, labels = self.samples[share]
        else:
            seed("batch", self.config.seed, self.rank, epoch, step)
            # A rank without a sample in the last batch of the test set takes part with none of one.
            chosen = default_collate([self.samples[i] for i in share.tolist() or [0]])
            images, labels = (part[: len(share)] for part in chosen)
        return self.fit(images), labels

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "loader": None}  # for a worker

    def __len__(self) -> int:
        return self.total // self.config.batch_size if self.train else -(-self.total // self.config.batch_size)

    def of(self, epoch: int, first: int = 0) -> Iterable[tuple[Tensor, Tensor]]:
        """Those of this epoch (another order in each, the same one on every rank), from the step `first` on."""
        self.places[:] = [(epoch, step) for step in range(first, len(self))]
        return self.loader or map(self.__getitem__, self.places)


def check_shares(network: nn.Module, total: int, config: Config, world: World) -> None:
    """Raises UsageError where a batch does not divide, or is more than there is, or a single sample would be normalised."""
    size, parts = config.batch_size, world.size * len(world.devices) * config.grad_accum
    shares = f"{parts} equal parts: {parts // config.grad_accum} processes or devices times --grad-accum {config.grad_accum}"
    refuse(size % parts != 0, f"--batch-size {size} does not divide into {shares}")
    refuse(total < size, f"--batch-size {size} is more than the {total} images to train on")
    normed = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in network.modules())
    refuse(normed and size == parts, f"{config.model} normalises batches, and in each pass a device would have a single image")


def deaf(worker: int) -> None:
    """A loader's worker leaves Ctrl-C to the training process, and dies of SIGTERM at once."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
