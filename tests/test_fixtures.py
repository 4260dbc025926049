"""The committed fixtures are what `fixtures/make.py` makes."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fixtures import make
from tests.support.graphs import Same, assert_same, load_with_tags
from tests.support.samples import FIXTURES, PTH, SAFETENSORS


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fixtures")
    make.main(folder)
    return folder


def test_every_fixture_is_made(made: Path) -> None:
    """No file is committed that the script does not make, and none is missing; all are small."""
    assert sorted(path.name for path in made.iterdir()) == sorted(path.name for path in (*PTH, *SAFETENSORS))
    assert sum(path.stat().st_size for path in FIXTURES.iterdir() if path.is_file()) < 3_000_000


@pytest.mark.parametrize("name", [path.name for path in PTH])
def test_fixtures_load_equal(made: Path, name: str) -> None:
    """A file made anew loads as the committed one: values, views, ties, tags. The last bit of a trained value is the CPU's."""
    (before, tags), (after, new_tags) = load_with_tags(FIXTURES / name), load_with_tags(made / name)
    if isinstance(before, torch.nn.Module):
        before, after = before.state_dict(), after.state_dict()
    assert_same(before, after, exact=False)
    assert list(tags.values()) == list(new_tags.values())


@pytest.mark.parametrize("name", [path.name for path in SAFETENSORS])
def test_safetensors_fixtures_load_equal(made: Path, name: str) -> None:
    assert_same(load_file(FIXTURES / name), load_file(made / name), exact=False)


def test_the_table_in_the_script_names_every_fixture() -> None:
    text = make.__doc__ or ""
    for path in (*PTH, *SAFETENSORS):
        assert path.name in text or (path.stem in text and path.suffix in text)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({"a": 1}, {"a": 1.0}), ([float("nan")], [0.0]), ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ([torch.ones(2)] * 2, [torch.ones(2), torch.ones(2)]), (torch.ones(2, 2), torch.ones(2, 2).t().contiguous().t()),
        (torch.ones(2), torch.nn.Parameter(torch.ones(2))), (torch.ones(4)[:2], torch.ones(2)), ([[]] * 2, [[], []]),
    ],
)  # fmt: skip
def test_the_comparison_sees_differences(one: object, two: object) -> None:
    with pytest.raises(AssertionError):
        Same().check(one, two)


def test_the_looser_comparison_sees_differences_too() -> None:
    """A last bit is forgiven where that was asked for, another value or another dtype is not."""
    one = torch.ones(2)
    assert_same(one, torch.nextafter(one, one * 2), exact=False)
    for other in (one + 1e-3, torch.ones(3), one.double()):
        with pytest.raises(AssertionError):
            assert_same(one, other, exact=False)
