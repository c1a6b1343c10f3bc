"""From a request's body to what the engine takes: prompts as tokens, parameters by choice, the format of the output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from ray_moe.engine.sampling import SamplingParams, choices
from ray_moe.errors import RequestError
from ray_moe.guidance import json_rule, lark_grammar
from ray_moe.serve.messages import Tool
from ray_moe.serve.schema import ChatRequest, CompletionRequest
from ray_moe.serve.tools import ToolForm, require_form
from ray_moe.text import render_chat

# OpenAI's own defaults: 16 tokens for a completion, no bound for a chat. Here a chat without a bound ends at what fits,
# and no later than this, so that a model which never ends does not hold its KV blocks up to the last position.
COMPLETION_MAX_TOKENS = 16
CHAT_MAX_TOKENS = 1024


@dataclass(frozen=True)
class Bounds:
    """What one request may ask for beyond what the model can: tokens of a prompt, and tokens to generate."""

    max_prompt_tokens: int | None = None
    max_tokens: int | None = None

    def check(self, prompt_tokens: int, params: SamplingParams) -> None:
        """Raises `RequestError`."""
        if self.max_prompt_tokens is not None and prompt_tokens > self.max_prompt_tokens:
            raise RequestError(
                f"the prompt has {prompt_tokens} tokens; this server takes {self.max_prompt_tokens}", "prompt"
            )
        if self.max_tokens is not None and params.max_tokens > self.max_tokens:
            raise RequestError(
                f"max_tokens is {params.max_tokens}; this server generates at most {self.max_tokens}", "max_tokens"
            )


@dataclass(frozen=True)
class ToolUse:
    """How calls of the tools that a request offers are told from text."""

    form: ToolForm
    tools: tuple[Tool, ...]
    several: bool


@dataclass(frozen=True)
class Work:
    """A request as the engine takes it: what each of its choices starts from, in order. `leads` are the texts that the
    choices begin with; with `tools` the output may hold calls of them."""

    prompts: tuple[tuple[int, ...], ...]
    params: tuple[SamplingParams, ...]
    leads: tuple[str, ...]
    prompt_tokens: int  # of all prompts; choices share theirs
    tools: ToolUse | None = None


def prompts_of(
    tokenizer: PreTrainedTokenizerBase, body: CompletionRequest | ChatRequest
) -> tuple[tuple[tuple[int, ...], str], ...]:
    """Each prompt's token ids, and the text that its answers begin with. Takes time: a prompt may be megabytes.

    Raises `RequestError` when the model has no chat template, its template refuses the messages, or ids that are to be
    echoed are no tokens.
    """
    if isinstance(body, ChatRequest):
        messages = [message.for_template() for message in body.messages]
        return ((render_chat(tokenizer, messages, [tool.for_template() for tool in body.offered_tools]), ""),)
    found = []
    for prompt in body.prompt:
        ids = tuple(tokenizer.encode(prompt)) if isinstance(prompt, str) else tuple(prompt)
        lead = "" if not body.echo else prompt if isinstance(prompt, str) else _decoded(tokenizer, ids)
        found.append((ids, lead))
    return tuple(found)


def _decoded(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    unknown = next((token for token in ids if not 0 <= token < len(tokenizer)), None)
    if unknown is not None:
        raise RequestError(f"prompt holds token id {unknown}; ids must be in [0, {len(tokenizer)})", "prompt")
    return str(tokenizer.decode(list(ids)))


def tool_use(form: ToolForm | None, body: CompletionRequest | ChatRequest) -> ToolUse | None:
    """What its answer may call; None for text alone. Raises `RequestError` where calls are demanded that the model's
    template has no form for."""
    if not isinstance(body, ChatRequest) or not body.offered_tools:
        return None
    if form is None and not body.demanded_tools:
        return None
    return ToolUse(require_form(form), body.offered_tools, body.parallel_tool_calls is not False)


def grammar_of(body: CompletionRequest | ChatRequest, tools: ToolUse | None) -> str | None:
    """The grammar of its answer; None for any text. Raises `RequestError`."""
    demanded = body.demanded_tools if isinstance(body, ChatRequest) else ()
    schema = body.output_schema
    if demanded and tools is not None:
        return lark_grammar("calls", tools.form.grammar(demanded, several=tools.several))
    if schema is None:
        return None
    if tools is None:
        return lark_grammar("json", json_rule(schema))
    return lark_grammar("calls | json", tools.form.grammar(tools.tools, several=tools.several), json_rule(schema))


def work_of(
    body: CompletionRequest | ChatRequest,
    prompts: Sequence[tuple[tuple[int, ...], str]],
    room: int,
    bounds: Bounds,
    tools: ToolUse | None,
    grammar: str | None,
) -> Work:
    """Puts a request's parts together; `room` are the positions that a prompt and its answer share.

    Raises `RequestError` out of bounds.
    """
    each: list[tuple[tuple[int, ...], SamplingParams, str]] = []
    for ids, lead in prompts:
        default = COMPLETION_MAX_TOKENS
        if isinstance(body, ChatRequest):
            default = min(max(1, room - len(ids)), CHAT_MAX_TOKENS)
        if bounds.max_tokens is not None:
            default = min(default, bounds.max_tokens)
        params = body.sampling(default, grammar)
        bounds.check(len(ids), params)
        each += [(ids, one, lead) for one in choices(params, body.n or 1)]
    starts, params_of, leads = zip(*each, strict=True)
    return Work(starts, params_of, leads, sum(len(ids) for ids, _ in prompts), tools)
