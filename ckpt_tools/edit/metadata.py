"""The text in a safetensors header, or in an index of shards, as it was asked for."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_tools.errors import NothingMatchedError
from ckpt_tools.frozen import frozen
from ckpt_tools.text import did_you_mean, some


@frozen
class MetadataEdit:
    """Texts to be set by key, and keys to be dropped."""

    texts: Sequence[tuple[str, str]] = ()
    dropped: Sequence[str] = ()

    def apply(self, metadata: dict[str, str]) -> None:
        """Edit the metadata that the output would have.

        Raises:
            NothingMatchedError: a key that is to be dropped is not there.
        """
        for key in self.dropped:
            if key not in metadata:
                there = f"There are {some(list(metadata))}." if metadata else "It has none."
                why = did_you_mean(key, metadata) or there
                raise NothingMatchedError(f"`drop_metadata={key!r}` is not in the metadata.", why=why)
            del metadata[key]
        metadata.update(self.texts)


UNEDITED = MetadataEdit()
