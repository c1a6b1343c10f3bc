"""Between tokens and text. The oracle is the whole: what a tokenizer decodes at once, cut at the first stop string."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from ray_moe.errors import ConfigError, RequestError
from ray_moe.models import tiny_moe_path
from ray_moe.serve.app import check_tokenizer
from ray_moe.text import TextStream, load_tokenizer, render_chat

TOKENIZER = load_tokenizer(tiny_moe_path())

# Text of every kind, dense in what is hard: many bytes to a character, joiners, and letters that repeat.
texts = st.text(
    st.one_of(st.characters(codec="utf-8", exclude_characters="\ufffd<"), st.sampled_from("aab é漢🚀\u200d"))
)


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


def streamed(pieces: Sequence[Sequence[int]], stop: Sequence[str] = ()) -> tuple[list[str], bool]:
    stream = TextStream(TOKENIZER, stop)
    return [*(stream.push(piece) for piece in pieces), stream.finish()], stream.stopped


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    return text[: min((at for one in stop if (at := text.find(one)) >= 0), default=len(text))]


@st.composite
def pieces_of_a_text(draw: st.DrawFn) -> tuple[str, list[list[int]]]:
    text = draw(texts)
    ids, pieces = ids_of(text), []
    while ids:
        size = draw(st.integers(0, 3))
        pieces.append(ids[:size])
        ids = ids[size:]
    return text, pieces


@settings(max_examples=100, deadline=None)
@given(pieces_of_a_text())
def test_a_stream_of_tokens_in_any_pieces_is_the_text(case: tuple[str, list[list[int]]]) -> None:
    text, pieces = case
    parts, stopped = streamed(pieces)
    assert "".join(parts) == text
    assert not stopped
    # A character is given whole or not yet: a replacement character would be half of one.
    assert not any("\ufffd" in part for part in parts)


@settings(max_examples=100, deadline=None)
@given(pieces_of_a_text(), st.lists(st.text("ab é漢", min_size=1, max_size=3), max_size=4))
def test_a_stream_ends_before_the_first_stop_string(case: tuple[str, list[list[int]]], stop: list[str]) -> None:
    text, pieces = case
    parts, stopped = streamed(pieces, stop)
    assert "".join(parts) == cut_at_stop(text, stop)
    assert stopped == any(one in text for one in stop)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=12))
def test_tokens_that_are_no_text_stream_as_they_decode_at_once(ids: list[int]) -> None:
    parts, _ = streamed([[token] for token in ids])
    assert "".join(parts) == TOKENIZER.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def test_the_first_byte_of_a_character_is_held_back_until_the_last_one_comes() -> None:
    ids = ids_of("🚀")
    assert len(ids) > 1  # otherwise this tests nothing
    stream = TextStream(TOKENIZER)
    assert [stream.push([token]) for token in ids] == [""] * (len(ids) - 1) + ["🚀"]


def test_a_generation_that_ends_inside_a_character_shows_that_something_is_missing() -> None:
    parts, _ = streamed([ids_of("a🚀")[:-1]])
    assert "".join(parts).startswith("a\ufffd")


def test_what_could_become_a_stop_string_is_held_back_and_given_when_it_does_not() -> None:
    stream = TextStream(TOKENIZER, ["xyz"])
    assert stream.push(ids_of("wx")) == "w"
    assert stream.push(ids_of("y")) == ""
    assert stream.push(ids_of("x")) == "xy"
    assert stream.finish() == "x"
    assert not stream.stopped


def test_nothing_comes_after_a_stop_string() -> None:
    stream = TextStream(TOKENIZER, ["stop"])
    assert stream.push(ids_of("go stop on")) == "go "
    assert stream.stopped
    assert stream.push(ids_of("more")) == ""
    assert stream.finish() == ""


def test_the_earliest_of_several_stop_strings_counts() -> None:
    assert streamed([ids_of("one two three")], ["three", "two"])[0] == ["one ", ""]


def test_special_tokens_are_no_text() -> None:
    eos = TOKENIZER.convert_tokens_to_ids("<|eos|>")
    assert "".join(streamed([[*ids_of("a"), eos, *ids_of("b")]])[0]) == "ab"


# -- Loading and chat templates


def copy_of_the_tokenizer(folder: Path, *, without: str = "") -> PreTrainedTokenizerBase:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if name != without:
            shutil.copy(tiny_moe_path() / name, folder / name)
    return load_tokenizer(folder)


def test_a_chat_is_rendered_by_the_models_own_template() -> None:
    ids = render_chat(TOKENIZER, [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well"}])
    text = "<|bos|><|user|>hi<|end|><|assistant|>well<|end|><|assistant|>"
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text
    assert list(ids) == ids_of(text)


def test_a_model_without_a_chat_template_points_to_completions(tmp_path: Path) -> None:
    tokenizer = copy_of_the_tokenizer(tmp_path, without="chat_template.jinja")
    with pytest.raises(RequestError, match="no chat template; use /v1/completions") as caught:
        render_chat(tokenizer, [{"role": "user", "content": "hi"}])
    assert caught.value.param == "messages"


def test_messages_that_the_template_refuses_are_a_request_error_with_its_words() -> None:
    with pytest.raises(RequestError, match=r"template refuses these messages: .* not wizard"):
        render_chat(TOKENIZER, [{"role": "wizard", "content": "hi"}])


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{tmp_path} has no tokenizer"):
        load_tokenizer(tmp_path)


def test_a_model_of_a_configuration_alone_has_no_tokenizer_although_transformers_makes_an_empty_one(
    tmp_path: Path,
) -> None:
    shutil.copy(tiny_moe_path() / "config.json", tmp_path)
    with pytest.raises(ConfigError, match=f"{tmp_path} has no tokenizer: prompts are token ids there, and no text"):
        load_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match=r"HTTP needs one, leave it out \(--no-http\)"):
        check_tokenizer(tmp_path, trust_remote_code=False)
    check_tokenizer(tiny_moe_path(), trust_remote_code=False)
    check_tokenizer(tmp_path / "on another machine", trust_remote_code=False)
