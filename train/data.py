"""Images and labels, and the loaders that hand each rank its share of every batch."""

import importlib
import random
import signal
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from click import UsageError
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler
from torch.utils.data.distributed import DistributedSampler

from train.config import Config, refuse
from train.parallel import World

CLASSES = 10
TORCHVISION = {
    "mnist": ("MNIST", "MNIST/raw/train-images-idx3-ubyte and its three companions"),
    "fashion-mnist": ("FashionMNIST", "FashionMNIST/raw/train-images-idx3-ubyte and its three companions"),
    "cifar10": ("CIFAR10", "cifar-10-batches-py/data_batch_1 and its companions"),
}


class Images(Dataset[tuple[Tensor, Tensor]]):
    """`pixels` (N, channels, height, width) uint8 and `labels` (N,) int64, handed out as batches that fit a network.

    The index is a list: a whole batch is cut, scaled to [`darkest`, 1] and resized at once. `fit` is the network's input
    shape (channels, height, width); the images' own where nobody sets it.
    """

    def __init__(self, pixels: Tensor, labels: Tensor) -> None:
        self.pixels, self.labels = pixels, labels
        self.fit: tuple[int, int, int] = (pixels.shape[1], pixels.shape[2], pixels.shape[3])
        self.darkest = -1

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: Sequence[int]) -> tuple[Tensor, Tensor]:
        chosen = torch.as_tensor(index)
        return fitted(self.pixels[chosen], self.fit, self.darkest), self.labels[chosen]


def fitted(pixels: Tensor, shape: tuple[int, int, int], darkest: int = -1) -> Tensor:
    """uint8 images (N, C, H, W) as floats in [darkest, 1] of (N, *shape): grey is repeated, colours are averaged to grey."""
    images = pixels.float() * (1 - darkest) / 255 + darkest
    if images.shape[1] != shape[0]:
        images = images.mean(1, keepdim=True).expand(-1, shape[0], -1, -1)
    if images.shape[2:] != shape[1:]:
        images = F.interpolate(images, shape[1:], mode="bilinear", align_corners=False)
    return images


def load(name: str, folder: Path = Path("data"), *, shape: str = "1x28x28", samples: int = 12_000) -> tuple[Images, Images]:
    """The training and the held-out test images of a data set, whose files are in `folder`.

    `shape` (CxHxW) and `samples` are those of `synthetic`. Raises UsageError, with what to install or where to put the
    files, where the data set is not to be had.
    """
    if name == "digits":
        return digits()
    if name == "synthetic":
        return synthetic(shape, samples)
    return from_torchvision(name, folder)


def digits() -> tuple[Images, Images]:
    """scikit-learn's 1,797 images of 8 x 8 (values 0 to 16), a fixed fifth of them, drawn at random, held out."""
    datasets = needed("sklearn.datasets", "--data digits needs scikit-learn: pip install -e '.[train]'")
    source = datasets.load_digits()
    pixels = (torch.as_tensor(source.images) * (255 / 16)).round().to(torch.uint8).unsqueeze(1)
    return held_out(pixels, torch.as_tensor(source.target, dtype=torch.int64))


def synthetic(shape: str, samples: int) -> tuple[Images, Images]:
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


def held_out(pixels: Tensor, labels: Tensor) -> tuple[Images, Images]:
    """Four fifths to train on and one to test with; the same split in every run, whatever its seed."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, rest = order[: len(order) // 5], order[len(order) // 5 :]
    return Images(pixels[rest], labels[rest]), Images(pixels[test], labels[test])


def from_torchvision(name: str, data_dir: Path) -> tuple[Images, Images]:
    """The published training and test sets, read by torchvision from files that are there; nothing is downloaded."""
    kind, files = TORCHVISION[name]
    datasets = needed(
        "torchvision.datasets",
        f"--data {name} needs a torchvision that fits torch {torch.__version__}: pip install -e '.[vision]'; "
        "--data digits works now",
    )
    try:
        train, test = (getattr(datasets, kind)(data_dir, train=part, download=False) for part in (True, False))
    except (RuntimeError, OSError, EOFError, ValueError) as error:
        raise UsageError(f"{data_dir} has no whole {name}: put {files} there; --data digits works now") from error
    return as_images(train), as_images(test)


def as_images(source: Any) -> Images:
    """A torchvision data set (N, H, W) or (N, H, W, C), as one tensor (N, C, H, W)."""
    pixels = torch.as_tensor(source.data)
    pixels = pixels.unsqueeze(1) if pixels.dim() == 3 else pixels.permute(0, 3, 1, 2).contiguous()
    return Images(pixels, torch.as_tensor(source.targets, dtype=torch.int64))


def needed(module: str, sentence: str) -> Any:
    """An optional package, or UsageError with `sentence`. (A torchvision of another torch raises RuntimeError.)"""
    try:
        return importlib.import_module(module)
    except (ImportError, RuntimeError, OSError) as error:
        raise UsageError(sentence) from error


class Batches(Sampler[tuple[int, list[int]]]):
    """Which images are in each of this rank's batches, and the seed of what is drawn to make it.

    Both are decided by the run's seed, the epoch and the step alone. So a resumed epoch begins at the step that it stopped
    before, without making the batches before it, and with the very batch that would have come.
    """

    def __init__(self, images: Images, config: Config, world: World, *, shuffle: bool) -> None:
        self.sampler: DistributedSampler[int] = DistributedSampler(
            images, num_replicas=world.size, rank=world.rank, shuffle=shuffle, seed=config.seed
        )
        self.batches = BatchSampler(self.sampler, config.batch_size // world.size, drop_last=False)
        self.run, self.epoch, self.step = f"{config.seed} {world.rank}", 0, 0

    def begin(self, epoch: int, step: int = 0) -> None:
        """The next pass is this epoch (another order in each, the same one on every rank), from `step` on."""
        self.epoch, self.step = epoch, step
        self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.batches)  # of a whole epoch

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        for step, chosen in islice(enumerate(self.batches), self.step, None):
            yield random.Random(f"{self.run} {self.epoch} {step}").getrandbits(63), chosen


class Seeded(Dataset[tuple[Tensor, Tensor]]):
    """Images as `Batches` asks for them: whatever torch draws to make a batch comes from its seed, in any worker."""

    def __init__(self, images: Images) -> None:
        self.images = images

    def __getitem__(self, batch: tuple[int, list[int]]) -> tuple[Tensor, Tensor]:
        seed, chosen = batch
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the GPUs too, which nobody forked
            return self.images[chosen]


class Split(NamedTuple):
    """Images, the loader of this rank's batches of them, and what decides their order."""

    images: Images
    loader: DataLoader[tuple[Tensor, Tensor]]
    batches: Batches


def split(images: Images, config: Config, world: World, *, shuffle: bool) -> Split:
    """This rank's share of each global batch.

    Rank r of W takes samples r, r + W, r + 2 W ... of one order that depends on the seed and the epoch alone. So its
    batches of `batch_size / W` make up, together, the very batch that a single process would see.
    """
    batches = Batches(images, config, world, shuffle=shuffle)
    loader = DataLoader(
        Seeded(images),
        batch_size=None,  # the batches are made at once, see Images
        sampler=batches,
        num_workers=config.workers,
        pin_memory=world.device.type == "cuda",
        generator=torch.Generator(),  # its own, so that a loader does not draw from the run's
        worker_init_fn=deaf,
    )
    return Split(images, loader, batches)


def deaf(worker: int) -> None:
    """A loader's worker leaves Ctrl-C to the training process, and dies of SIGTERM at once."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def real_samples(step: int, local: int, total: int, config: Config, world: World) -> tuple[Tensor, int]:
    """Which of this rank's `local` samples count in global batch `step` of `total` samples, and the batch's true size.

    DistributedSampler repeats samples at the end until all ranks have equally many. The repeated ones go through the
    network, since all ranks must take the same steps, and weigh 0 instead of 1 in every loss and every count.
    """
    start = step * config.batch_size
    positions = start + world.rank + world.size * torch.arange(local)
    return (positions < total).float(), min(config.batch_size, total - start)


def refuse_lone_samples(network: nn.Module, total: int, config: Config, world: World) -> None:
    """Raises UsageError where batch normalisation would have to take the statistics of a single sample."""
    last = -(-(total % config.batch_size or config.batch_size) // world.size)
    sizes = [
        len(part)
        for local in (config.batch_size // world.size, last)
        for passed in torch.arange(local).chunk(config.grad_accum)
        for part in passed.chunk(len(world.devices))
    ]
    normed = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in network.modules())
    lone = f"--batch-size {config.batch_size} leaves of {total} images a batch of one, and {config.model} normalises batches"
    refuse(normed and min(sizes) == 1, f"{lone} of two or more: choose another")
