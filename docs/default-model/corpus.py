"""Write the training text: plain English in the public domain, read out of two Debian packages.

    apt-get download r-cran-janeaustenr=1.0.0-1 sword-text-web=426.0-1
    python corpus.py --packages . --out corpus

One paragraph a line, one file a book, ASCII punctuation. In every book, every 40th block of 8 lines goes to
``heldout/``, the rest to ``train/``. Needs ``pip install rdata`` and Debian's dpkg-deb.
"""

from __future__ import annotations

import argparse
import re
import struct
import subprocess
import tempfile
import warnings
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import rdata

PACKAGES = ("r-cran-janeaustenr_1.0.0-1_all.deb", "sword-text-web_426.0-1_all.deb")
PUNCTUATION = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'", "—": "--", "–": "-", "…": "...", "\xa0": " "})
RETOLD = {"dangr", "esthgr"}  # Daniel and Esther a second time, from the Greek
BLOCK, EVERY = 8, 40


def novels(root: Path) -> Iterator[tuple[str, list[str]]]:
    """Jane Austen's six novels. R's lazy-load file is records of a length, a zlib stream, and an R value in it."""
    rest = (root / "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb").read_bytes()
    while rest:
        stream = zlib.decompressobj()
        data = stream.decompress(rest[4:])  # the first four bytes are the unpacked length
        rest = stream.unused_data
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # rdata says that it takes a bare value for an RDS file
            lines = rdata.conversion.convert(rdata.parser.parse_data(data))
        text = "\n".join(line.strip() for line in lines)
        paragraphs = [" ".join(part.split()) for part in re.split(r"\n\n+", text)]
        yield paragraphs[0].lower().replace(" ", "-"), [part.replace("_", "") for part in paragraphs if part]


def bible(root: Path) -> Iterator[tuple[str, list[str]]]:
    """The World English Bible. A SWORD zText module: an index of (offset, packed, unpacked), a zlib stream a book."""
    folder = root / "usr/share/sword/modules/texts/ztext/engWEB2015eb"
    for part in ("ot", "nt"):
        index, data = ((folder / f"{part}.{suffix}").read_bytes() for suffix in ("bzs", "bzz"))
        for offset, packed, _ in struct.iter_unpack("<III", index):
            osis = zlib.decompress(data[offset : offset + packed]).decode()
            for book in re.split(r'(?=<div [^>]*type="book"/>)', osis):
                found = re.search(r'osisID="(\w+)" sID="[^"]*" type="book"/>', book)
                if found and (name := found[1].lower()) not in RETOLD:
                    yield name, list(osis_paragraphs(book))


def osis_paragraphs(osis: str) -> Iterator[str]:
    """Running text of a book, a paragraph at a time; titles and footnotes left out."""
    osis = re.sub(r"<(note|title)\b.*?</\1>", " ", osis, flags=re.DOTALL)
    for part in re.split(r'<div [^>]*type="x-p"/>|<lg [^>]*/>|<chapter [^>]*/>', osis):
        text = " ".join(re.sub(r"<[^>]*>", "", re.sub(r"</w>(?=<)|<l [^>]*/>|<lb[^>]*/>", " ", part)).split())
        if text:
            yield re.sub(r"\s+([,.;:!?])", r"\1", text)


def split(lines: Iterable[str]) -> tuple[list[str], list[str]]:
    """Lines to train on, and those held out."""
    train: list[str] = []
    heldout: list[str] = []
    for i, line in enumerate(lines):
        (heldout if i // BLOCK % EVERY == EVERY - 1 else train).append(line)
    return train, heldout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", type=Path, default=Path(), help="folder that holds the .deb files")
    parser.add_argument("--out", type=Path, default=Path("corpus"))
    arguments = parser.parse_args()
    sizes = {"train": 0, "heldout": 0}
    with tempfile.TemporaryDirectory() as scratch:
        for package in PACKAGES:
            subprocess.run(["dpkg-deb", "-x", arguments.packages / package, scratch], check=True)
        for read in (novels, bible):
            for name, lines in read(Path(scratch)):
                clean = [line.translate(PUNCTUATION) for line in lines]
                for kind, chosen in zip(sizes, split(clean), strict=True):
                    file = arguments.out / kind / f"{read.__name__}-{name}.txt"
                    file.parent.mkdir(parents=True, exist_ok=True)
                    if chosen:
                        file.write_text("\n".join(chosen) + "\n")
                        sizes[kind] += file.stat().st_size
    print(f"{arguments.out}: {sizes['train'] / 1e6:.2f} MB to train on, {sizes['heldout'] / 1e6:.3f} MB held out")


if __name__ == "__main__":
    main()
