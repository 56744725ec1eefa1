"""Blocks in hand-written pages that are filled from records: the lines between two markers."""

import re
from collections.abc import Mapping

from fedbat.errors import ConfigError

_BLOCK = re.compile(r"(<!-- from the records: ([\w-]+) -->\n).*?(<!-- end -->)", re.S)


def block_names(page: str) -> list[str]:
    """The names of a page's blocks, in order."""
    return [name for _, name, _ in _BLOCK.findall(page)]


def fill(page: str, blocks: Mapping[str, str]) -> str:
    """The page with its blocks filled anew."""
    if unknown := set(block_names(page)) - blocks.keys():
        raise ConfigError(f"a page asks for {', '.join(sorted(unknown))}; the records make {', '.join(blocks)}")
    return _BLOCK.sub(lambda found: f"{found[1]}\n{blocks[found[2]].strip()}\n\n{found[3]}", page)
