"""Files with the encoded rows of pictures and sounds, so that other processes need not encode them again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cbatch.errors import CacheError, words_of
from cbatch.support.logs import Log

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cbatch.backend import Vocab
    from cbatch.cache.store import CacheStore, NoStore
    from cbatch.support.picture_tokens import PromptMedium

_log = Log("cbatch.rows")


class KeptRows:
    """Reads rows in place of encoding, and writes those that were encoded. From any thread."""

    def __init__(self, store: CacheStore | NoStore, vocab: Vocab) -> None:
        self._store, self._vocab = store, vocab

    def read(self, media: Sequence[PromptMedium]) -> list[PromptMedium]:
        """Give rows to the pictures and sounds that have a file; return the others, which are to be encoded."""
        return [m for m in dict.fromkeys(media) if not m.is_encoded and not self._has_read(m)]

    def _has_read(self, medium: PromptMedium) -> bool:
        try:
            cells = self._store.read(medium.key, self._vocab.media_fingerprint)
            medium.restore(cells.data)
        except CacheError as error:
            if not error.is_missing:
                _log.warn("%s is encoded again: %s", medium.key, error.reason)
            return False
        except ValueError as error:
            _log.warn("%s is encoded again: the rows in its file %s", medium.key, error)
            return False
        return True

    def write(self, media: Sequence[PromptMedium]) -> None:
        """Write the rows of pictures and sounds; what cannot be written is logged."""
        from cbatch.cache.cell_file import CachedCells  # numpy is slow to import

        for medium in media:
            try:
                cells = CachedCells((), 0, medium.state())
                self._store.write(medium.key, cells, self._vocab.media_fingerprint)
            except Exception as error:  # noqa: PERF203
                why = error.reason if isinstance(error, CacheError) else words_of(error)
                _log.warn("%s was not saved on disk: %s", medium.key, why)
