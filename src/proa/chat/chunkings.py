"""Ways to cut a model's output into chunks, to see that a parser's answer does not depend on them."""

from __future__ import annotations

import codecs
import random
import re
from collections.abc import Iterable, Iterator, Sequence

from proa.chat.output.events import Piece

__all__ = ["chunkings", "pieces_of"]

# Longer texts are not cut in two at every byte, but near the markers and at random places.
_MAX_EVERY_CUT = 4096
_NEAR = 32
_MARKERS_LOOKED_AT = 16
_RANDOM_CUTS = 100
_RANDOM_SPLITS = 50


def pieces_of(text: str, markers: Iterable[str], ordinary: Sequence[Sequence[int]] = ()) -> list[Piece]:
    """The markers spelled out in `text` and what stands between them.

    `ordinary`: (begin, end) of UTF-8 bytes of spellings that are not markers.
    """
    data = text.encode()
    plain = {(begin, end) for begin, end in ordinary}
    pattern = re.compile(b"|".join(re.escape(marker.encode()) for marker in markers))
    pieces: list[Piece] = []
    begin = 0
    for match in pattern.finditer(data):
        if match.span() in plain:
            continue
        pieces += [(data[begin : match.start()].decode(), False), (match[0].decode(), True)]
        begin = match.end()
    pieces.append((data[begin:].decode(), False))
    return [piece for piece in pieces if piece[0]]


def chunkings(pieces: Sequence[Piece], *, every: bool) -> Iterator[tuple[str, list[list[Piece]]]]:
    """Names and chunks of the same output.

    Whole and piece by piece; with `every` also cut in two at every byte, byte by byte and at random places. Markers
    stay whole; a cut inside a character leaves its first bytes to the next chunk.
    """
    yield "whole", [list(pieces)]
    yield "pieces", [[piece] for piece in pieces]
    if not every:
        return
    atoms = _atoms(pieces)
    rng = random.Random(len(atoms))
    for cut in _two_way_cuts(atoms, rng):
        yield f"cut {cut}", _cut(atoms, [cut])
    yield "bytes", _cut(atoms, range(1, len(atoms)))
    for number in range(_RANDOM_SPLITS if len(atoms) > 1 else 0):
        count = rng.randint(1, min(40, len(atoms) - 1))
        yield f"random {number}", _cut(atoms, sorted(rng.sample(range(1, len(atoms)), count)))


_Atom = tuple[bytes, bool]


def _atoms(pieces: Sequence[Piece]) -> list[_Atom]:
    """The smallest parts: bytes of text, whole markers."""
    atoms: list[_Atom] = []
    for text, is_marker in pieces:
        data = text.encode()
        atoms += [(data, True)] if is_marker else [(data[i : i + 1], False) for i in range(len(data))]
    return atoms


def _two_way_cuts(atoms: Sequence[_Atom], rng: random.Random) -> list[int]:
    size = len(atoms)
    if size <= _MAX_EVERY_CUT:
        return list(range(1, size))
    markers = [position for position, (_, is_marker) in enumerate(atoms) if is_marker]
    looked_at = markers[:_MARKERS_LOOKED_AT] + markers[-_MARKERS_LOOKED_AT:]
    near = {position + offset for position in looked_at for offset in range(-_NEAR, _NEAR + 1)}
    return sorted({cut for cut in near if 0 < cut < size} | set(rng.sample(range(1, size), _RANDOM_CUTS)))


def _cut(atoms: Sequence[_Atom], cuts: Sequence[int]) -> list[list[Piece]]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    chunks: list[list[Piece]] = []
    for begin, end in zip([0, *cuts], [*cuts, len(atoms)], strict=True):
        chunk: list[Piece] = []
        run: list[bytes] = []
        for data, is_marker in atoms[begin:end]:
            if is_marker:
                chunk += [(decoder.decode(b"".join(run)), False), (data.decode(), True)]
                run = []
            else:
                run.append(data)
        chunk.append((decoder.decode(b"".join(run)), False))
        chunks.append([piece for piece in chunk if piece[0]])
    return chunks
