"""The embedded checkpoint: its format, its tokenizer and chat template, and that it has learned what its card says."""

from __future__ import annotations

import hashlib
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, Qwen3MoeForCausalLM

from ray_moe.errors import ConfigError
from ray_moe.models import tiny_moe_path
from ray_moe.models.tiny_moe_text import conversations, plays, scenes, split_text
from ray_moe.models.train_tiny_moe import balance_loss, evaluate
from ray_moe.models.train_tiny_moe import main as train_main

DATA = Path(__file__).parent / "data"
EXCERPT = DATA / "tiny_moe_heldout.txt"  # the first 2 kB that the model was not trained on
MAX_BYTES = 8_000_000
LAYERS, EXPERTS, TOP_K = 4, 16, 2


@pytest.fixture(scope="module")
def model() -> Any:
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(tiny_moe_path(), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(tiny_moe_path())


@pytest.fixture(scope="module")
def card() -> dict[str, Any]:
    return json.loads((tiny_moe_path() / "training.json").read_text())


def encode(tokenizer: Any, text: str) -> Tensor:
    return torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])


def known_word_share(text: str) -> float:
    """Share of the words of `text` that are among the 500 most frequent of the training text (the plays: 0.71)."""
    known = set((DATA / "folio_words.txt").read_text().split())
    words = re.findall(r"[a-z']+", text.lower())
    return sum(word in known for word in words) / len(words)


# --- the files --------------------------------------------------------------------------------------------------------


def test_the_whole_folder_stays_within_eight_megabytes() -> None:
    sizes = {file.name: file.stat().st_size for file in tiny_moe_path().iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md", "training.json"} <= sizes.keys()
    assert sum(sizes.values()) <= MAX_BYTES, sizes


def test_the_weights_are_bf16_with_one_tensor_for_each_projection_of_each_expert() -> None:
    with safe_open(tiny_moe_path() / "model.safetensors", framework="pt") as weights:
        keys = set(weights.keys())
        dtypes = {weights.get_slice(key).get_dtype() for key in keys}
        shape = weights.get_slice("model.layers.0.mlp.experts.0.gate_proj.weight").get_shape()
    experts = {
        f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight"
        for layer in range(LAYERS)
        for expert in range(EXPERTS)
        for name in ("gate", "up", "down")
    }
    assert {key for key in keys if ".experts." in key} == experts
    assert dtypes == {"BF16"}
    assert shape == [128, 128]  # F, D
    assert "lm_head.weight" not in keys  # tied to the embedding


def test_the_configuration_is_the_qwen3_moe_that_the_card_describes(model: Any, card: dict[str, Any]) -> None:
    config = model.config
    assert type(model) is Qwen3MoeForCausalLM
    assert (config.num_hidden_layers, config.num_experts, config.num_experts_per_tok) == (LAYERS, EXPERTS, TOP_K)
    assert config.norm_topk_prob
    assert config.tie_word_embeddings
    assert config.max_position_embeddings == 2048
    assert sum(p.numel() for p in model.parameters()) == card["parameters"]


def test_generation_ends_at_either_end_token(tokenizer: Any) -> None:
    ends = tokenizer.convert_tokens_to_ids(["<|end|>", "<|eos|>"])
    assert GenerationConfig.from_pretrained(tiny_moe_path()).eos_token_id == ends


# --- tokenizer and chat template --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "To be, or not to be",
        "   Ham. Words,\n  words ,\twords .\n\n\n",
        " ñ 漢字 🚀 e\u0301 \u200d\u202e\x00",
        "it ' s n't , !  spaces  stay",
    ],
)
def test_any_text_round_trips_through_the_tokenizer(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode(text) == ids, "encoding adds no token of its own"


def test_special_tokens_are_single_ids_and_are_skipped_in_decoding(tokenizer: Any) -> None:
    specials = ["<|bos|>", "<|eos|>", "<|pad|>", "<|user|>", "<|assistant|>", "<|end|>"]
    assert tokenizer.encode("".join(specials)) == [0, 1, 2, 3, 4, 5]
    assert tokenizer.decode([0, 3, *tokenizer.encode("Adieu"), 5], skip_special_tokens=True) == "Adieu"


def test_the_chat_template_renders_turns_and_the_generation_prompt(tokenizer: Any) -> None:
    turns = [
        {"role": "user", "content": "Who's there?"},
        {"role": "assistant", "content": "Nay answer me:"},
        {"role": "user", "content": [{"type": "text", "text": "Long "}, {"type": "text", "text": "liue the King"}]},
    ]
    body = "<|bos|><|user|>Who's there?<|end|><|assistant|>Nay answer me:<|end|><|user|>Long liue the King<|end|>"
    assert tokenizer.apply_chat_template(turns, tokenize=False) == body
    assert tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) == body + "<|assistant|>"


def test_a_system_message_opens_the_next_user_turn_only(tokenizer: Any) -> None:
    turns = [
        {"role": "system", "content": "Speake plaine."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ]
    rendered = tokenizer.apply_chat_template(turns, tokenize=False)
    assert rendered == ("<|bos|><|user|>Speake plaine.\none<|end|><|assistant|>two<|end|><|user|>three<|end|>")


def test_a_role_that_the_model_does_not_know_is_refused_by_name(tokenizer: Any) -> None:
    with pytest.raises(Exception, match="not wizard"):
        tokenizer.apply_chat_template([{"role": "wizard", "content": "42"}], tokenize=False)


def test_tools_their_calls_and_their_answers_have_a_place_in_the_template(tokenizer: Any) -> None:
    tool = {"type": "function", "function": {"name": "now", "parameters": {}}}
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": {"zone": "UTC"}}}
    turns = [
        {"role": "user", "content": "What houre?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "noon"},
    ]
    assert tokenizer.apply_chat_template(turns, tools=[tool], tokenize=False) == (
        '<|bos|><|user|>{"type": "function", "function": {"name": "now", "parameters": {}}}\nWhat houre?<|end|>'
        '<|assistant|><tool_call>{"name": "now", "arguments": {"zone": "UTC"}}</tool_call><|end|>'
        "<|user|><tool_response>noon</tool_response><|end|>"
    )


# --- what it has learned ----------------------------------------------------------------------------------------------


def test_the_stated_held_out_loss_is_reproduced_on_the_committed_excerpt(
    model: Any, tokenizer: Any, card: dict[str, Any]
) -> None:
    text = EXCERPT.read_text()
    assert hashlib.sha256(text.encode()).hexdigest() == card["excerpt"]["sha256"]
    loss, _ = evaluate(model, encode(tokenizer, text))
    assert loss == pytest.approx(card["excerpt"]["loss_nats_per_token"], abs=2e-3)  # another device's fp32, four digits
    assert loss < 0.5 * torch.tensor(float(model.config.vocab_size)).log(), "under half of what a uniform guess costs"


def test_experts_are_used_unevenly_in_every_layer_and_none_is_dead(
    model: Any, tokenizer: Any, card: dict[str, Any]
) -> None:
    ids_T = encode(tokenizer, EXCERPT.read_text())
    _, counts_LE = evaluate(model, ids_T)
    assert counts_LE.shape == (LAYERS, EXPERTS)
    assert counts_LE.sum(1).tolist() == [TOP_K * len(ids_T)] * LAYERS
    assert counts_LE.min() > 0
    assert (counts_LE.max(1).values / counts_LE.mean(1)).min() > 1.5  # measured 2.0 to 5.3
    assert min(card["held_out"]["expert_share_min"]) > 0.1 / EXPERTS, "over the whole held-out text"


@torch.no_grad()
def test_samples_are_made_of_the_words_of_the_plays(model: Any, tokenizer: Any) -> None:
    prompt = encode(tokenizer, "\n\n   King. My Lord,")[None]
    torch.manual_seed(0)
    sampled = model.generate(prompt.expand(4, -1), do_sample=True, temperature=0.7, max_new_tokens=80)
    greedy = model.generate(prompt, do_sample=False, max_new_tokens=80)
    random_ids = torch.randint(6, model.config.vocab_size, (320,))
    fresh = prompt.shape[1]
    assert known_word_share(" ".join(tokenizer.batch_decode(sampled[:, fresh:], skip_special_tokens=True))) > 0.75
    assert known_word_share(tokenizer.decode(greedy[0, fresh:], skip_special_tokens=True)) > 0.75
    assert known_word_share(tokenizer.decode(random_ids)) < 0.5, "random tokens must not pass this test"


@torch.no_grad()
def test_a_chat_reply_ends_by_itself(model: Any, tokenizer: Any) -> None:
    chat = [{"role": "user", "content": "What newes from France, my Lord?"}]
    prompt = encode(tokenizer, tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
    torch.manual_seed(0)
    replies = model.generate(prompt.expand(8, -1), do_sample=True, temperature=0.7, max_new_tokens=240)
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    ended = [end in reply for reply in replies[:, len(prompt) :].tolist()]
    assert sum(ended) >= 6, ended
    assert all(known_word_share(text) > 0.5 for text in tokenizer.batch_decode(replies, skip_special_tokens=True))


# --- how it was made --------------------------------------------------------------------------------------------------

TWO_PLAYS = """\
The First Play

Actus Primus. Scoena Prima.

Enter Bernardo and Francisco.

  Bar. Who's there?
  Fran. Nay answer me: Stand & vnfold
your selfe

   Bar. Long liue the King. Exit.

Exeunt.

  Hor. Friends to this ground, and a new scene

FINIS. The First Play,
printed at London.

The Second Play

   Iul. Aye me, it is not yet neere day
"""


def test_the_printers_finis_separates_plays() -> None:
    assert [play.splitlines()[0] for play in plays(TWO_PLAYS)] == ["The First Play", "The Second Play"]
    assert not any("FINIS" in play or "London" in play for play in plays(TWO_PLAYS))


def test_speeches_lose_speaker_and_stage_directions_and_scenes_break_them_apart() -> None:
    assert list(scenes(plays(TWO_PLAYS)[0]))[1:] == [
        ["Who's there?", "Nay answer me: Stand & vnfold\nyour selfe", "Long liue the King."],
        ["Friends to this ground, and a new scene"],
    ]


def test_a_conversation_pairs_neighbouring_speeches_and_refuses_very_short_replies() -> None:
    found = list(conversations(plays(TWO_PLAYS)[0], random.Random(0)))
    assert [[message["content"] for message in messages] for messages in found] == [
        ["Who's there?", "Nay answer me: Stand & vnfold\nyour selfe"],
    ]
    assert [message["role"] for message in found[0]] == ["user", "assistant"]


def test_training_and_held_out_text_are_disjoint_and_complete() -> None:
    text = "".join(f"line {i}\n" for i in range(1000))
    trained, held_out = split_text(text)
    assert trained + held_out == text
    assert trained.endswith("\n")
    assert 0.04 < len(held_out) / len(text) <= 0.05


def test_training_with_dense_experts_gives_the_routed_models_logits_and_gradients(tokenizer: Any) -> None:
    ids = encode(tokenizer, "   Ham. To be, or not to be, that is the Question")[None]
    results = []
    for implementation in ("eager", "tiny_moe_dense"):
        model = AutoModelForCausalLM.from_pretrained(
            tiny_moe_path(), dtype=torch.float32, experts_implementation=implementation
        )
        logits = model(ids).logits
        logits.square().mean().backward()
        results.append((logits.detach(), model.model.layers[1].mlp.experts.gate_up_proj.grad))
    (routed, routed_grad), (dense, dense_grad) = results
    torch.testing.assert_close(dense, routed, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(dense_grad, routed_grad, atol=1e-4, rtol=1e-3)


def test_balance_loss_is_one_when_even_and_the_experts_over_k_when_all_routes_go_one_way() -> None:
    even_TE = torch.eye(4).repeat(2, 1) * 1e-6 + torch.eye(4).roll(1, 0).repeat(2, 1) * 1e-6
    one_way_TE = torch.tensor([[50.0, 50.0, 0.0, 0.0]]).repeat(8, 1)
    assert balance_loss((even_TE,), 2).item() == pytest.approx(1.0, abs=1e-4)
    assert balance_loss((one_way_TE,), 2).item() == pytest.approx(2.0, abs=1e-4)


@pytest.mark.slow
def test_the_training_script_makes_a_checkpoint_that_loads(tmp_path: Path) -> None:
    data = tmp_path / "plays.txt"
    data.write_text(EXCERPT.read_text() * 30)
    small = {"steps": 3, "warmup": 1, "vocab-size": 400, "hidden": 32, "ffn": 16, "layers": 1, "tokens-per-step": 512}
    options = [word for name, value in small.items() for word in (f"--{name}", str(value))]
    train_main(["--data", str(data), "--out", str(tmp_path / "out"), "--device", "cpu", *options])
    made = json.loads((tmp_path / "out" / "training.json").read_text())
    assert made["recipe"]["steps"] == 3
    assert made["data"]["sha256"] == hashlib.sha256(data.read_bytes()).hexdigest()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.hidden_size == 32
    assert made["parameters"] == sum(p.numel() for p in model.parameters())


def test_a_text_too_short_to_hold_out_an_excerpt_is_refused_with_both_numbers(tmp_path: Path) -> None:
    data = tmp_path / "plays.txt"
    data.write_text(EXCERPT.read_text())
    with pytest.raises(ConfigError, match=r"characters held out; the bound is over 2048"):
        train_main(["--data", str(data), "--out", str(tmp_path / "out"), "--device", "cpu"])
