"""Messages to token ids and back, through the model's renderer."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import msgspec
from renderers import RenderedTokens, Renderer
from renderers.base import ParsedResponse, Tokenizer, create_renderer, load_tokenizer
from renderers.default import DefaultRenderer
from renderers.reasoning import prompt_ends_in_reasoning

from rollstream.core.errors import UsageError

logger = logging.getLogger(__name__)


class Rendering:
    """One tokenizer and renderer, used from the event loop's thread alone (fast tokenizers are not thread-safe).

    Whole renders are cached: the members of a group share their prompt. Cached ids must not be modified.
    """

    def __init__(self, renderer: Renderer, tokenizer: Tokenizer, *, cached: int = 1024) -> None:
        self.renderer = renderer
        self._tokenizer = tokenizer
        self.stop_token_ids: list[int] = list(renderer.get_stop_token_ids())
        self._cached = cached
        self._renders: OrderedDict[bytes, RenderedTokens] = OrderedDict()
        self._plain: dict[tuple[int, ...], bool] = {}

    @classmethod
    def load(cls, model: str) -> Rendering:
        """Load the tokenizer of ``model`` (directory or hub id); raises ``UsageError`` when that fails."""
        try:
            tokenizer = load_tokenizer(model)
            return cls(create_renderer(tokenizer), tokenizer)
        except Exception as error:
            raise UsageError(
                f"the tokenizer of model {model!r} cannot be loaded: {type(error).__name__}: {error}",
                hint="give --model.name a directory with tokenizer files, or a hub id that this machine can reach",
            ) from error

    def render(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None) -> RenderedTokens:
        """The whole conversation with the generation prompt."""
        key = msgspec.json.encode((messages, tools))
        found = self._renders.get(key)
        if found is None:
            found = self.renderer.render(list(messages), tools=tools, add_generation_prompt=True)
            self._renders[key] = found
            if len(self._renders) > self._cached:
                self._renders.popitem(last=False)
        return found

    def parse(self, completion: list[int], prompt: list[int], tools: Sequence[dict[str, Any]] | None) -> ParsedResponse:
        """The sampled tokens as a message."""
        context = None if self._needs_no_prompt(prompt) else prompt
        return self.renderer.parse_response(completion, prompt_ids=context, tools=tools)

    def _needs_no_prompt(self, prompt: list[int]) -> bool:
        """Whether parsing can leave the prompt aside: it opens no reasoning. Cached, as a group shares its prompt."""
        if not isinstance(self.renderer, DefaultRenderer):
            return False
        key = tuple(prompt)
        if key not in self._plain:
            if len(self._plain) >= self._cached:
                self._plain.clear()
            stops = frozenset(self.stop_token_ids)
            self._plain[key] = not prompt_ends_in_reasoning(self._tokenizer, prompt, stop_ids=stops)
        return self._plain[key]
