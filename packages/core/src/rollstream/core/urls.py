"""URLs as people may see them."""

from __future__ import annotations

import re


def without_credentials(url: str) -> str:
    """``url`` (or several, separated by commas) without what stands before an @: a password, a token, a user."""
    return re.sub(r"(\w+://)[^/\s,]*@", r"\1", url)
