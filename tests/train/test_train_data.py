"""Every rank sees its share of a single process's batch; readers take the true file formats; networks are as published."""

import gzip
import pickle
import struct
from itertools import chain
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from train import data
from train.config import Config
from train.models import NETWORKS, build_for
from train.parallel import World

CPU = (torch.device("cpu"),)


def batches(images: TensorDataset, size: int, rank: int, epoch: int = 0, *, train: bool = True) -> list[list[int]]:
    """The real samples of each of a rank's batches, by the label that numbers them."""
    world = World(CPU, rank, size)
    return [
        labels.tolist() for _, labels in data.Batches(images, data.fitted, Config(batch_size=12), world, train=train).of(epoch)
    ]


@pytest.mark.parametrize("total", [48, 49, 55, 59, 7, 2])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_share_the_batches_of_a_single_process(total: int, size: int) -> None:
    """To train on, whole batches alone, in even shares; to test with, uneven ones too: none is missing, none counts twice."""
    images = TensorDataset(torch.zeros(total, 1, 2, 2, dtype=torch.uint8), torch.arange(total))
    for train in (True, False):
        whole = batches(images, 1, 0, train=train)
        shares = [batches(images, size, rank, train=train) for rank in range(size)]
        assert [sorted(chain(*parts)) for parts in zip(*shares, strict=True)] == [sorted(batch) for batch in whole]
        assert not train or {len(share) for share in chain(*shares)} <= {12 // size}
        assert len({*chain(*whole)}) == len([*chain(*whole)]) == (total // 12 * 12 if train else total)
    if total >= 48:  # each epoch has an order of its own
        assert batches(images, 1, 0, epoch=0) != batches(images, 1, 0, epoch=1) == batches(images, 1, 0, epoch=1)


def test_digits_are_the_1797_real_images_with_a_fifth_held_out() -> None:
    train, test = data.load("digits")
    assert (len(train), len(test)) == (1438, 359)
    assert train.tensors[0].dtype == torch.uint8
    assert train.tensors[0].shape[1:] == (1, 8, 8)
    assert torch.bincount(torch.cat([train.tensors[1], test.tensors[1]])).tolist() == [
        *(178, 182, 177, 183, 181, 182, 181, 179, 174, 180)
    ]


def test_images_come_scaled_and_resized_and_with_the_channels_asked_for() -> None:
    pixels = torch.tensor([0, 255], dtype=torch.uint8).reshape(2, 1, 1, 1).expand(2, 1, 8, 8)
    grey = data.fitted(pixels, (3, 32, 32))
    assert grey.shape == (2, 3, 32, 32)
    assert grey.amin((1, 2, 3)).tolist() == grey.amax((1, 2, 3)).tolist() == [-1, 1]
    assert data.fitted(pixels, (3, 8, 8), darkest=0).amin((1, 2, 3)).tolist() == [0, 1]
    colour = torch.tensor([0, 255, 255], dtype=torch.uint8).reshape(1, 3, 1, 1).expand(1, 3, 4, 4)
    assert data.fitted(colour, (1, 4, 4))[0, 0, 0, 0].item() == pytest.approx(1 / 3)


def test_synthetic_images_have_any_shape_and_are_the_same_every_time() -> None:
    (train, test), (again, _) = (data.load("synthetic", shape="3x5x7", samples=50) for _ in range(2))
    assert (train.tensors[0].shape, test.tensors[0].shape) == ((40, 3, 5, 7), (10, 3, 5, 7))
    assert torch.equal(train.tensors[0], again.tensors[0])


def idx(values: torch.Tensor) -> bytes:
    """The IDX format of unsigned bytes: 0, 0, 8, the number of dimensions, each as a big-endian int32, the values."""
    return struct.pack(f">BBBB{values.dim()}i", 0, 0, 8, values.dim(), *values.shape) + bytes(values.flatten().tolist())


@pytest.mark.parametrize(("name", "folder"), [("mnist", "MNIST"), ("fashion-mnist", "FashionMNIST")])
def test_idx_files_are_read(name: str, folder: str, tmp_path: Path) -> None:
    raw = tmp_path / folder / "raw"
    raw.mkdir(parents=True)
    images = torch.randint(256, (7, 28, 28), dtype=torch.uint8)
    labels = torch.arange(7, dtype=torch.uint8)
    for part, count in (("train", 5), ("t10k", 2)):
        (raw / f"{part}-images-idx3-ubyte").write_bytes(idx(images[:count]))
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(idx(labels[:count]))
        (raw / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(b"not read"))
    train, test = data.load(name, tmp_path)
    assert torch.equal(train.tensors[0], images[:5].unsqueeze(1))
    assert torch.equal(test.tensors[0], images[:2].unsqueeze(1))
    assert train.tensors[1].tolist() == [0, 1, 2, 3, 4]


def test_cifar_files_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    rows = torch.randint(256, (12, 3072), dtype=torch.uint8)
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    for i, name in enumerate(names):
        content = {"data": rows[2 * i : 2 * i + 2].numpy(), "labels": [i, i + 1], "batch_label": name, "filenames": []}
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": [str(i) for i in range(10)]}, protocol=2))
    train, test = data.load("cifar10", tmp_path)
    assert torch.equal(train.tensors[0], rows[:10].reshape(10, 3, 32, 32))
    assert torch.equal(test.tensors[0], rows[10:].reshape(2, 3, 32, 32))
    assert train.tensors[1].tolist() == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5]


# --- networks


@pytest.mark.parametrize(
    ("name", "channels", "hidden", "count"),
    [
        ("mlp", 1, 0, 101_770), ("lenet", 3, 0, 62_006), ("lenet", 1, 0, 61_706), ("cnn", 3, 0, 800_940_490),
        ("cnn", 3, 5000, 604_137_490), ("cnn-published", 3, 0, 800_940_490), ("resnet18", 1, 0, 11_175_818),
    ],
)  # fmt: skip
def test_parameter_counts_are_the_published_ones(name: str, channels: int, hidden: int, count: int) -> None:
    with torch.device("meta"):
        network = NETWORKS[name](channels, **({"hidden": hidden} if hidden else {}))
    assert sum(parameter.numel() for parameter in network.parameters()) == count


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("image", [(1, 8, 8), (3, 32, 32)])
def test_each_network_takes_images_of_every_data_set(name: str, image: tuple[int, int, int]) -> None:
    images = torch.zeros(2, *image, dtype=torch.uint8)
    network, fit = build_for(Config(model=name, width=0.05), TensorDataset(images, torch.zeros(2)))
    assert network(fit(images)).shape == (2, 10)


def test_the_published_cnn_has_no_relus_on_pixels_of_0_to_1() -> None:
    """The article's own, by hand: convolutions and max-pooling, then three linear layers with nothing between them."""
    network = NETWORKS["cnn-published"](3, width=0.01)
    images = torch.rand(2, 3, 32, 32)
    x = images
    for name, layer in network.named_children():
        if not name.startswith(("conv", "fc")):
            continue
        x = layer(x.flatten(1) if name == "fc1" else x)
        x = torch.nn.functional.max_pool2d(x, 2) if name in ("conv3", "conv4", "conv6") else x
    assert torch.equal(network(images), x)
    bent = NETWORKS["cnn"](3, width=0.01)
    bent.load_state_dict(network.state_dict())
    assert not torch.equal(bent(images), x)
    assert [NETWORKS[name].darkest for name in ("cnn", "cnn-published")] == [-1, 0]


def test_width_scales_every_inner_channel_count_down_to_eight() -> None:
    shapes = [tuple(p.shape) for name, p in NETWORKS["cnn"](3, width=0.03).named_parameters() if name.endswith("weight")]
    assert [shape[0] for shape in shapes] == [8, 8, 15, 31, 61, 123, 240, 8, 10]


def test_resnet_starts_from_the_published_weights() -> None:
    network = NETWORKS["resnet18"](1)
    weights = [network.get_parameter(f"block4.{i}.conv{j}.weight") for i in (0, 1) for j in (1, 2)]
    assert all(abs(weight.std().item() - 0.01) < 1e-4 for weight in weights)
    assert all(abs(weight.mean().item()) < 1e-4 for weight in weights)
