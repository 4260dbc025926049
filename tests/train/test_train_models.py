"""The four networks have the parameters and the shapes that were published."""

import pytest
import torch

from train.models import NETWORKS, build, input_shape


@pytest.mark.parametrize(
    ("name", "channels", "hidden", "count"),
    [
        ("mlp", 1, 8000, 101_770),
        ("lenet", 3, 8000, 62_006),
        ("lenet", 1, 8000, 61_706),
        ("cnn", 3, 8000, 800_940_490),
        ("cnn", 3, 5000, 604_137_490),
        ("cnn-published", 3, 8000, 800_940_490),
        ("resnet18", 1, 8000, 11_175_818),
    ],
)
def test_parameter_counts_are_the_published_ones(name: str, channels: int, hidden: int, count: int) -> None:
    with torch.device("meta"):
        network = build(name, channels, hidden=hidden)
    assert sum(parameter.numel() for parameter in network.parameters()) == count


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("image", [(1, 8, 8), (3, 32, 32)])
def test_each_network_takes_images_of_every_data_set(name: str, image: tuple[int, int, int]) -> None:
    shape = input_shape(name, image)
    network = build(name, shape[0], width=0.05)
    assert network(torch.zeros(2, *shape)).shape == (2, 10)


def test_the_published_cnn_has_no_relus_on_pixels_of_0_to_1() -> None:
    """The article's own, by hand: convolutions and max-pooling, then three linear layers with nothing between them."""
    network = build("cnn-published", 3, width=0.01)
    images = torch.rand(2, 3, 32, 32)
    x = images
    for name, layer in network.named_children():
        x = layer(x.flatten(1) if name == "fc1" else x)
        x = torch.nn.functional.max_pool2d(x, 2) if name in ("conv3", "conv4", "conv6") else x
    assert torch.equal(network(images), x)
    bent = build("cnn", 3, width=0.01)
    bent.load_state_dict(network.state_dict())
    assert not torch.equal(bent(images), x)
    assert [NETWORKS[name].darkest for name in ("cnn", "cnn-published")] == [-1, 0]


def test_width_scales_every_inner_channel_count_down_to_eight() -> None:
    shapes = [tuple(p.shape) for name, p in build("cnn", 3, width=0.03).named_parameters() if name.endswith("weight")]
    assert [shape[0] for shape in shapes] == [8, 8, 15, 31, 61, 123, 240, 8, 10]


def test_resnet_starts_from_the_published_weights() -> None:
    network = build("resnet18", 1)
    weights = [network.get_parameter(f"block4.{i}.conv{j}.weight") for i in (0, 1) for j in (1, 2)]
    assert all(abs(weight.std().item() - 0.01) < 1e-4 for weight in weights)
    assert all(abs(weight.mean().item()) < 1e-4 for weight in weights)
