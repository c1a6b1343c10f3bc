"""The text side of training `tiny-moe`: a file of plays becomes a tokenizer, token streams and chat conversations.

Written for a plain-text First Folio: a speech starts with two or three blanks, the speaker's name and a full stop; a
blank line, a stage direction or the next speaker ends it; "FINIS." ends a play.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import tokenizers
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from ray_moe.errors import ConfigError

SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|pad|>", "<|user|>", "<|assistant|>", "<|end|>")
HELD_OUT_SHARE = 0.05
EXCERPT_CHARS = 2048

# System text has no role of its own in the training data: it opens the next user turn, on lines of its own. So do
# tools, which the training data does not have.
CHAT_TEMPLATE = """\
{%- macro text(content) -%}
{%- if content is string -%}{{ content }}
{%- else -%}{%- for part in content -%}{{ part.text }}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- set pending = namespace(system='') -%}
{%- for tool in tools or [] -%}{%- set pending.system = pending.system + (tool | tojson) + '\\n' -%}{%- endfor -%}
{{- '<|bos|>' -}}
{%- for message in messages -%}
{%- if message.role in ('system', 'developer') -%}
{%- set pending.system = pending.system + text(message.content) + '\\n' -%}
{%- elif message.role == 'user' -%}
{{- '<|user|>' + pending.system + text(message.content) + '<|end|>' -}}
{%- set pending.system = '' -%}
{%- elif message.role == 'assistant' -%}
{{- '<|assistant|>' + text(message.content) -}}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' -}}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson -}}
{{- '}</tool_call>' -}}
{%- endfor -%}
{{- '<|end|>' -}}
{%- elif message.role == 'tool' -%}
{{- '<|user|><tool_response>' + text(message.content) + '</tool_response><|end|>' -}}
{%- else -%}
{{- raise_exception('tiny-moe knows the roles system, developer, user, assistant and tool, not ' + message.role) -}}
{%- endif -%}
{%- endfor -%}
{%- if pending.system -%}{{- '<|user|>' + pending.system + '<|end|>' -}}{%- endif -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""

SPEECH = re.compile(r"^ {2,3}[A-Z1-9][^.\n]{0,24}\. (.+)$")  # "   Ham. To be, or not to be": three blanks, the speaker
STAGE = re.compile(r"^\s*(Enter|Exit|Exeunt|Flourish|Alarum|Actus|Sc(oe|ae|e)na)\b")
STAGE_AT_END = re.compile(r"\s*\b(Exit|Exeunt|Enter)\b[^.]*\.?$")
SCENE_BREAK = re.compile(r"^\s*(Exeunt|Actus|Sc(oe|ae|e)na)\b")


def split_text(text: str) -> tuple[str, str]:
    """(training text, held-out text): the last `HELD_OUT_SHARE` of the characters, from a line start, is held out."""
    cut = text.index("\n", int(len(text) * (1 - HELD_OUT_SHARE))) + 1
    return text[:cut], text[cut:]


def opening(held_out_text: str) -> str:
    """The first `EXCERPT_CHARS` characters and the rest of their line: short enough to ship and check everywhere.

    Raises ConfigError where the text ends before that.
    """
    if "\n" not in held_out_text[EXCERPT_CHARS:]:
        raise ConfigError(
            f"the text leaves {len(held_out_text)} characters held out; the bound is over {EXCERPT_CHARS}"
        )
    return held_out_text[: held_out_text.index("\n", EXCERPT_CHARS) + 1]


def plays(text: str) -> list[str]:
    """Plays in order; the printer's FINIS paragraphs, which only repeat the title, are the borders."""
    return [play for part in re.split(r"(?m)^FINIS\..*(?:\n.+)*\n*", text) if (play := part.strip("\n"))]


def scenes(text: str) -> Iterator[list[str]]:
    """Speeches in order, without the speakers' names and stage directions, one list for each scene."""
    scene: list[list[str]] = []
    speaking = False
    for line in text.splitlines():
        if match := SPEECH.match(line):
            scene.append([match[1]])
            speaking = True
        elif speaking and line.strip() and not STAGE.match(line):
            scene[-1].append(line.strip())
        else:
            speaking = False
            if SCENE_BREAK.match(line):
                yield [STAGE_AT_END.sub("", "\n".join(speech)).strip() for speech in scene]
                scene = []
    yield [STAGE_AT_END.sub("", "\n".join(speech)).strip() for speech in scene]


def conversations(text: str, rng: random.Random) -> Iterator[list[dict[str, str]]]:
    """Chat messages of one to three exchanges. Each speech serves once as a user's and once as an assistant's turn.

    Long speeches would fill the context and very short replies ("I, my Lord") teach little: both end a conversation.
    """
    for scene in scenes(text):
        for first in (0, 1):
            messages: list[dict[str, str]] = []
            exchanges = rng.randint(1, 3)
            for said, reply in zip(scene[first::2], scene[first + 1 :: 2], strict=False):
                fits = 1 <= len(said) <= 600 and 24 <= len(reply) <= 600
                if messages and (not fits or len(messages) == 2 * exchanges):
                    yield messages
                    messages, exchanges = [], rng.randint(1, 3)
                if fits:
                    messages += [{"role": "user", "content": said}, {"role": "assistant", "content": reply}]
            if messages:
                yield messages


def train_tokenizer(text: str, vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE: any text round-trips. Encoding adds no token; the chat template writes <|bos|>."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(plays(text), trainer)
    bos, eos, pad, *others = SPECIAL_TOKENS
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=bos,
        eos_token=eos,
        pad_token=pad,
        additional_special_tokens=others,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def encode_plays(tokenizer: PreTrainedTokenizerFast, text: str) -> Tensor:
    """Token ids [T] of all plays of `text`, each between <|bos|> and <|eos|>."""
    bos, eos = SPECIAL_TOKENS[:2]
    texts = [bos + play + eos for play in plays(text)]
    return torch.tensor(
        [token for ids in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] for token in ids]
    )


def encode_conversations(tokenizer: PreTrainedTokenizerFast, text: str, seed: int) -> tuple[Tensor, Tensor]:
    """Token ids [T] of all conversations in a shuffled order, and the positions where conversations start."""
    chats = list(conversations(text, random.Random(seed)))
    random.Random(seed + 1).shuffle(chats)
    rendered = [f"{tokenizer.apply_chat_template(chat, tokenize=False)}{SPECIAL_TOKENS[1]}" for chat in chats]
    ids: list[int] = []
    starts: list[int] = []
    for conversation in tokenizer(rendered, add_special_tokens=False)["input_ids"]:
        starts.append(len(ids))
        ids += conversation
    return torch.tensor(ids), torch.tensor(starts)


class Batches:
    """Random windows of both streams, on their device, of several lengths so that all positions are trained."""

    WINDOWS = (256, 512, 1024, 2048)

    def __init__(
        self, plays_T: Tensor, chats_T: Tensor, chat_starts: Tensor, tokens_per_step: int, chat_share: float, seed: int
    ) -> None:
        self.plays_T, self.chats_T = plays_T, chats_T
        self.chat_starts = chat_starts[chat_starts < len(chats_T) - max(self.WINDOWS)]
        if len(plays_T) <= max(self.WINDOWS) or not len(self.chat_starts):
            raise ConfigError(
                f"{len(plays_T)} tokens of plays, {len(chats_T)} of speeches; the bound is over 2048 of each"
            )
        self.tokens_per_step, self.chat_share, self.random = tokens_per_step, chat_share, random.Random(seed)

    def draw(self) -> Tensor:
        """Token ids [B, W], about `tokens_per_step` in all, `chat_share` of the rows starting at a conversation."""
        window = self.random.choice(self.WINDOWS)
        rows = max(2, self.tokens_per_step // window)
        chats = round(rows * self.chat_share)
        device = self.plays_T.device
        play_starts = torch.randint(len(self.plays_T) - window, (rows - chats,), device=device)
        chat_starts = self.chat_starts[torch.randint(len(self.chat_starts), (chats,), device=device)]
        offsets = torch.arange(window, device=device)
        return torch.cat([self.plays_T[play_starts[:, None] + offsets], self.chats_T[chat_starts[:, None] + offsets]])
