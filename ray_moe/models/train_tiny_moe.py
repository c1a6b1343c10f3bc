"""Train the embedded model `tiny-moe`: a byte-level BPE tokenizer and a Qwen3-MoE language model on one file of plays.

    python -m ray_moe.models.train_tiny_moe --data first-folio.txt --out tiny-moe --device cuda

Every batch mixes two streams: the plays as printed, each between <|bos|> and <|eos|>, and conversations made of the
plays' own speeches (one is the user's, the next one the assistant's), so that a chat reply is a speech that ends by
itself at <|end|>. The last 5 % of the text is never trained on; the weights with the lowest loss there are kept.

Letters: T tokens, D hidden, F ffn, E experts, K top-k, L layers, V vocabulary, B rows of a batch, W tokens of a row.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import hashlib
import json
import math
import platform
import time
from datetime import date
from pathlib import Path
from typing import Any

import tokenizers
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ray_moe.models.tiny_moe_text import (
    Batches,
    encode_conversations,
    encode_plays,
    opening,
    split_text,
    train_tokenizer,
)

EVAL_WINDOW = 512


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Every number that decides the result; each is a command-line option of the same name."""

    vocab_size: int = 2048
    hidden: int = 128
    layers: int = 4
    experts: int = 16
    top_k: int = 2
    ffn: int = 128
    heads: int = 4
    kv_heads: int = 2
    steps: int = 2400
    tokens_per_step: int = 32768
    peak_lr: float = 6e-3
    warmup: int = 150
    weight_decay: float = 0.3
    dropout: float = 0.2
    chat_share: float = 0.3
    balance: float = 0.002
    eval_every: int = 100
    seed: int = 0


# --- model ------------------------------------------------------------------------------------------------------------


def dense_experts(module: Any, hidden_TD: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> Tensor:
    """All experts on all tokens, gates zero where not routed: result and gradient of routing, and autocast applies.

    Eight times the arithmetic, but no sorting, no host synchronisation and few launches: the better trade here.
    """
    gates_TE = topk_weights_TK.new_zeros(len(hidden_TD), module.num_experts).scatter(1, topk_ids_TK, topk_weights_TK)
    act_ETF = module._apply_gate(torch.einsum("td,efd->etf", hidden_TD, module.gate_up_proj))
    return torch.einsum("etf,edf->td", act_ETF * gates_TE.T[:, :, None], module.down_proj)


ALL_EXPERTS_FUNCTIONS.register("tiny_moe_dense", dense_experts)


def build_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Qwen3MoeForCausalLM:
    """A fresh fp32 model; residual dropout hangs on hooks, so the saved architecture is plain Qwen3-MoE."""
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    settings: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": recipe.hidden,
        "intermediate_size": recipe.top_k * recipe.ffn,
        "moe_intermediate_size": recipe.ffn,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.heads,
        "num_key_value_heads": recipe.kv_heads,
        "head_dim": recipe.hidden // recipe.heads,
        "num_experts": recipe.experts,
        "num_experts_per_tok": recipe.top_k,
        "norm_topk_prob": True,
        "tie_word_embeddings": True,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "router_aux_loss_coef": recipe.balance,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": [end, tokenizer.eos_token_id],
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = Qwen3MoeConfig(**settings)
    config._experts_implementation = "tiny_moe_dense"
    model = Qwen3MoeForCausalLM(config)

    def drop(module: nn.Module, args: object, output: Any) -> Any:
        if isinstance(output, tuple):
            return (F.dropout(output[0], recipe.dropout, module.training), *output[1:])
        return F.dropout(output, recipe.dropout, module.training)

    model.model.embed_tokens.register_forward_hook(drop)
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(drop)
        layer.mlp.register_forward_hook(drop)
    return model


def balance_loss(router_logits: tuple[Tensor, ...], top_k: int) -> Tensor:
    """Switch Transformer's load-balance loss (Fedus et al., 2021), averaged over layers; 1 at perfect balance."""
    losses = []
    for logits_TE in router_logits:
        probs_TE = logits_TE.float().softmax(-1)
        share_E = torch.zeros_like(probs_TE).scatter(1, probs_TE.topk(top_k).indices, 1 / top_k).mean(0)
        losses.append(probs_TE.shape[1] * (share_E * probs_TE.mean(0)).sum())
    return torch.stack(losses).mean()


def next_token_loss(logits_BWV: Tensor, ids_BW: Tensor) -> Tensor:
    return F.cross_entropy(logits_BWV[:, :-1].flatten(0, 1).float(), ids_BW[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: Any, ids_T: Tensor, rows: int = 32) -> tuple[float, Tensor]:
    """(mean next-token loss in nats, expert counts [L, E]) over disjoint windows of `EVAL_WINDOW` tokens of `ids_T`."""
    model.eval()
    loss, predicted, counts_LE = 0.0, 0, torch.zeros(0)
    for batch in ids_T.split(EVAL_WINDOW * rows):
        full = len(batch) // EVAL_WINDOW * EVAL_WINDOW
        pieces = (batch[:full].view(-1, EVAL_WINDOW), batch[full:][None])  # whole windows, then the rest as a short one
        for ids_BW in (piece for piece in pieces if piece.numel() > 1):
            out = model(ids_BW, output_router_logits=True, use_cache=False)
            loss += next_token_loss(out.logits, ids_BW).item() * ids_BW[:, 1:].numel()
            predicted += ids_BW[:, 1:].numel()
            logits_LTE = torch.stack(out.router_logits)
            chosen_LTK = logits_LTE.topk(model.config.num_experts_per_tok).indices
            found_LE = torch.zeros_like(logits_LTE).scatter(2, chosen_LTK, 1.0).sum(1).cpu()
            counts_LE = found_LE if counts_LE.numel() == 0 else counts_LE + found_LE
    return loss / predicted, counts_LE


# --- training ---------------------------------------------------------------------------------------------------------


def train(model: Any, batches: Batches, held_out_T: Tensor, recipe: Recipe, device: str) -> list[dict[str, float]]:
    """Train in place and leave the weights of the lowest held-out loss in `model`; returns the loss history."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=recipe.peak_lr, betas=(0.9, 0.95), fused=device.startswith("cuda"))
    history: list[dict[str, float]] = []
    best, best_weights, begun = math.inf, copy.deepcopy(model.state_dict()), time.monotonic()
    for step in range(1, recipe.steps + 1):
        after_warmup = max(0.0, (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup))
        lr = (
            recipe.peak_lr
            * min(1.0, step / max(1, recipe.warmup))
            * (0.02 + 0.49 * (1 + math.cos(math.pi * after_warmup)))
        )
        for group in optimizer.param_groups:
            group["lr"] = lr
        model.train()
        ids_BW = batches.draw()
        with torch.autocast("cuda", torch.bfloat16, enabled=device.startswith("cuda")):
            out = model(ids_BW, output_router_logits=True, use_cache=False)
        loss = next_token_loss(out.logits, ids_BW)
        (loss + recipe.balance * balance_loss(out.router_logits, recipe.top_k)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % recipe.eval_every == 0 or step == recipe.steps:
            held_out, counts_LE = evaluate(model, held_out_T)
            skew = [round(skew, 2) for skew in (counts_LE.max(1).values / counts_LE.mean(1)).tolist()]
            history.append({"step": step, "train_loss": round(loss.item(), 4), "held_out_loss": round(held_out, 4)})
            print(history[-1], f"hottest expert over mean {skew}, {time.monotonic() - begun:.0f} s", flush=True)
            if held_out < best:
                best, best_weights = held_out, copy.deepcopy(model.state_dict())
    model.load_state_dict(best_weights)
    return history


def describe(args: argparse.Namespace, recipe: Recipe, seconds: float) -> dict[str, Any]:
    """What training.json says about how the run was made; `main` adds what came of it."""
    cuda = args.device.startswith("cuda")
    return {
        "date": date.today().isoformat(),
        "recipe": dataclasses.asdict(recipe),
        "data": {"file": args.data.name, "sha256": hashlib.sha256(args.data.read_bytes()).hexdigest()},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
        "hardware": torch.cuda.get_device_name(args.device) if cuda else f"{platform.machine()} CPU",
        "train_seconds": round(seconds),
    }


def options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the embedded model tiny-moe.")
    parser.add_argument("--data", type=Path, required=True, help="UTF-8 text of the plays")
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint; made if missing")
    parser.add_argument("--excerpt", type=Path, help="also write the held-out excerpt of training.json to this file")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for field in dataclasses.fields(Recipe):
        parser.add_argument("--" + field.name.replace("_", "-"), type=type(field.default), default=field.default)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = options(argv)
    recipe = Recipe(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Recipe)})
    torch.manual_seed(recipe.seed)
    train_text, held_out_text = split_text(args.data.read_text(encoding="utf-8"))
    excerpt = opening(held_out_text)

    tokenizer = train_tokenizer(train_text, recipe.vocab_size)
    plays_T = encode_plays(tokenizer, train_text)
    chats_T, chat_starts = encode_conversations(tokenizer, train_text, recipe.seed)
    held_out_T = encode_plays(tokenizer, held_out_text).to(args.device)
    model = build_model(recipe, tokenizer).to(args.device)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters:,} parameters; {len(plays_T):,} tokens of plays, {len(chats_T):,} of conversations", flush=True)

    begun = time.monotonic()
    streams = (plays_T.to(args.device), chats_T.to(args.device), chat_starts.to(args.device))
    batches = Batches(*streams, recipe.tokens_per_step, recipe.chat_share, recipe.seed)
    history = train(model, batches, held_out_T, recipe, args.device)
    made = describe(args, recipe, time.monotonic() - begun)

    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=True,
        temperature=0.7,
    )
    model.to(torch.bfloat16).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)

    # The rounded weights, in the model's own plain experts code: what a reader of the checkpoint can reproduce.
    shipped = Qwen3MoeForCausalLM.from_pretrained(args.out, dtype=torch.float32, experts_implementation="eager")
    shipped.to(args.device)
    held_out, counts_LE = evaluate(shipped, held_out_T)
    excerpt_ids_T = torch.tensor(tokenizer(excerpt, add_special_tokens=False)["input_ids"], device=args.device)
    excerpt_loss, _ = evaluate(shipped, excerpt_ids_T)
    share_LE = counts_LE / counts_LE.sum(1, keepdim=True)
    made |= {
        "parameters": parameters,
        "tokens": {"plays": len(plays_T), "conversations": len(chats_T), "held_out": len(held_out_T)},
        "held_out": {
            "loss_nats_per_token": round(held_out, 4),
            "bits_per_byte": round(held_out * len(held_out_T) / math.log(2) / len(held_out_text.encode()), 4),
            "window": EVAL_WINDOW,
            "expert_share_min": [round(share, 4) for share in share_LE.min(1).values.tolist()],
            "expert_share_max": [round(share, 4) for share in share_LE.max(1).values.tolist()],
        },
        "excerpt": {
            "sha256": hashlib.sha256(excerpt.encode()).hexdigest(),
            "tokens": len(excerpt_ids_T),
            "loss_nats_per_token": round(excerpt_loss, 4),
        },
        "history": history,
    }
    (args.out / "training.json").write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    if args.excerpt:
        args.excerpt.write_text(excerpt, encoding="utf-8")
    print({key: made[key] for key in ("parameters", "tokens", "held_out", "excerpt")})


if __name__ == "__main__":
    main()
