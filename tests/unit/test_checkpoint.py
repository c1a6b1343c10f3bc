"""Checkpoint: one expert of one layer from disk, against the tensors that transformers itself loads."""

from __future__ import annotations

import json
import resource
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    InklingTextConfig,
    NemotronHConfig,
    PretrainedConfig,
)
from transformers.core_model_loading import MergeModulelist, Transpose, WeightConverter

from ray_moe.errors import CheckpointError, ConfigError, UnsupportedModelError
from ray_moe.weights.checkpoint import (
    Checkpoint,
    ExpertLayout,
    ExpertWeights,
)
from ray_moe.weights.shards import INDEX_NAME, SINGLE_NAME
from ray_moe.weights.sources import ParameterSource, experts_modules
from tests.families import (
    EXPERTS,
    FAMILIES,
    FFN,
    HIDDEN,
    MOE_LAYERS,
    build_family,
    build_model,
    family_config,
    save_model,
)

Layout = Callable[[Tensor], Tensor]


def module_weights(module: Any, expert: int) -> dict[str, Tensor]:
    """The oracle: one expert's slices of transformers' own experts module, turned to our layout by index arithmetic."""
    up_name = "gate_up_proj" if module.has_gate else "up_proj"
    slices = {"gate_up": getattr(module, up_name)[expert], "down": module.down_proj[expert]}
    if module.is_transposed:
        slices = {name: tensor.t() for name, tensor in slices.items()}
    if module.has_bias:
        slices |= {
            "gate_up_bias": getattr(module, f"{up_name}_bias")[expert],
            "down_bias": module.down_proj_bias[expert],
        }
    if not module.is_concatenated:
        for name in {"gate_up", "gate_up_bias"} & set(slices):
            rows = slices[name].shape[0]
            order = [*range(0, rows, 2), *range(1, rows, 2)]
            slices[name] = slices[name][order]
    return slices


def assert_every_expert_equals_the_module(folder: Path, dtype: torch.dtype) -> Checkpoint:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation="eager")
    checkpoint = Checkpoint(folder)
    compared = 0
    for layer, _, module in experts_modules(model):
        for expert in range(checkpoint.num_experts):
            found = dict(checkpoint.expert(layer, expert).named_tensors())
            expected = module_weights(module, expert)
            assert found.keys() == expected.keys()
            for name, tensor in expected.items():
                assert found[name].dtype is dtype
                assert found[name].is_contiguous()
                assert torch.equal(found[name], tensor), (layer, expert, name)
            compared += 1
    assert compared == len(checkpoint.moe_layers) * checkpoint.num_experts
    return checkpoint


def rewrite(folder: Path, key: str, change: Callable[[Tensor], Tensor | None]) -> Path:
    """Replaces one tensor on disk, or removes it (also from the index) when `change` gives None. Returns its shard."""
    index = json.loads((folder / INDEX_NAME).read_text())
    shard = folder / index["weight_map"][key]
    tensors = load_file(shard)
    changed = change(tensors.pop(key))
    if changed is None:
        del index["weight_map"][key]
        (folder / INDEX_NAME).write_text(json.dumps(index))
    else:
        tensors[key] = changed.contiguous()
    save_file(tensors, shard, metadata={"format": "pt"})
    return shard


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("packed", [False, True], ids=["original", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_expert_equals_the_slices_that_transformers_loads(
    name: str, dtype: torch.dtype, packed: bool, tmp_path: Path
) -> None:
    folder = build_family(name, tmp_path, packed=packed, dtype=dtype)
    assert len(list(folder.glob("*.safetensors"))) > 1
    checkpoint = assert_every_expert_equals_the_module(folder, dtype)
    assert checkpoint.moe_layers == MOE_LAYERS[name]
    assert checkpoint.num_experts == EXPERTS
    assert checkpoint.dtype is dtype
    assert {checkpoint.shape(layer) for layer in checkpoint.moe_layers} == {(HIDDEN, FFN)}
    assert checkpoint.expert_bytes == checkpoint.expert(checkpoint.moe_layers[0], 0).nbytes


def test_the_two_layouts_really_differ_on_disk(tmp_path: Path) -> None:
    for name in FAMILIES:
        keys = [
            set(json.loads((folder / INDEX_NAME).read_text())["weight_map"])
            for folder in (
                build_family(name, tmp_path / name / "o"),
                build_family(name, tmp_path / name / "p", packed=True),
            )
        ]
        assert (keys[0] == keys[1]) is (name == "gpt_oss"), name  # gpt_oss is published packed


# Families whose attention the engine cannot page: their experts can still be read, and served to other people's trunks.
OTHER_MAPPINGS: dict[str, PretrainedConfig] = {
    "no gate": NemotronHConfig(
        vocab_size=320,
        hidden_size=64,
        layer_types=["moe", "full_attention", "moe"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        moe_shared_expert_intermediate_size=32,
    ),
    "interleaved on disk": InklingTextConfig(
        vocab_size=320,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        n_routed_experts=8,
        num_experts_per_tok=2,
        intermediate_size=96,
        moe_intermediate_size=48,
    ),
}


@pytest.mark.parametrize("packed", [False, True], ids=["original", "packed"])
@pytest.mark.parametrize("case", OTHER_MAPPINGS)
def test_other_conversions_are_read_as_the_mapping_says(case: str, packed: bool, tmp_path: Path) -> None:
    folder = save_model(build_model(OTHER_MAPPINGS[case]), tmp_path, packed=packed)
    checkpoint = assert_every_expert_equals_the_module(folder, torch.float32)
    weights = checkpoint.expert(checkpoint.moe_layers[0], 0)
    assert weights.has_gate is (case != "no gate")
    assert weights.layout == checkpoint.layout(checkpoint.moe_layers[0])
    assert weights.gate_up.shape[0] == (48 if case == "no gate" else 96)


def test_a_conversion_that_looks_at_shapes_sees_one_expert() -> None:
    transpose = WeightConverter("experts.down_proj", "experts.down_proj", [Transpose(1, 2, check_dims=True)])
    source = ParameterSource("layers.0.experts.down_proj", (8, 64, 48), transpose, {})
    stored = torch.randn(1, 48, 64)
    turned = source.assemble({"experts.down_proj": stored}, PretrainedConfig())
    kept = source.assemble({"experts.down_proj": stored.mT.contiguous()}, PretrainedConfig())
    assert torch.equal(turned, stored[0].t())
    assert torch.equal(kept, stored[0].t())


def test_a_single_file_reads_like_shards(tmp_path: Path) -> None:
    model = build_model(family_config("qwen3_moe"))
    model.save_pretrained(tmp_path, max_shard_size="1GB")
    assert [file.name for file in tmp_path.glob("*.safetensors")] == [SINGLE_NAME]
    assert_every_expert_equals_the_module(tmp_path, torch.float32)


def test_an_expert_is_cast_only_when_asked(tmp_path: Path) -> None:
    checkpoint = Checkpoint(build_family("mixtral", tmp_path))
    stored, cast = checkpoint.expert(1, 3), checkpoint.expert(1, 3, dtype=torch.bfloat16)
    assert (stored.dtype, cast.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(cast.gate_up, stored.gate_up.to(torch.bfloat16))


def test_reading_one_expert_of_a_packed_tensor_takes_one_experts_memory(tmp_path: Path) -> None:
    hidden, ffn, experts = 2048, 2048, 40
    config = family_config("mixtral")
    config.update(
        {"hidden_size": hidden, "intermediate_size": ffn, "num_local_experts": experts, "num_hidden_layers": 1}
    )
    config.dtype = torch.float32
    config.save_pretrained(tmp_path)
    header: dict[str, Any] = {}
    end = 0
    for leaf, shape in (("gate_up_proj", (experts, 2 * ffn, hidden)), ("down_proj", (experts, hidden, ffn))):
        start, end = end, end + 4 * torch.Size(shape).numel()
        header[f"model.layers.0.mlp.experts.{leaf}"] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    raw = json.dumps(header).encode()
    with (tmp_path / SINGLE_NAME).open("wb") as stream:
        stream.write(len(raw).to_bytes(8, "little") + raw)
        stream.truncate(8 + len(raw) + end)  # sparse: 2 GiB of zeros that take no disk
    checkpoint = Checkpoint(tmp_path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    weights = checkpoint.expert(0, experts - 1)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert weights.nbytes == checkpoint.expert_bytes == end // experts
    assert grown < end / 4, f"reading {weights.nbytes} bytes took {grown} of a file of {end}"


@pytest.mark.parametrize("packed", [False, True], ids=["original", "packed"])
def test_an_expert_that_was_read_does_not_follow_later_changes_of_the_file(packed: bool, tmp_path: Path) -> None:
    folder = build_family("qwen3_moe", tmp_path, packed=packed)
    weights = Checkpoint(folder).expert(1, 3)
    kept = [tensor.clone() for _, tensor in weights.named_tensors()]
    for shard in folder.glob("*.safetensors"):
        size = shard.stat().st_size
        with shard.open("r+b") as stream:
            stream.seek(size // 4)
            stream.write(b"\x01" * (size - size // 4))
    assert all(torch.equal(tensor, copy) for (_, tensor), copy in zip(weights.named_tensors(), kept, strict=True))


def test_experts_are_read_from_several_threads_alike(tmp_path: Path) -> None:
    checkpoint = Checkpoint(build_family("qwen3_moe", tmp_path))
    jobs = [(layer, expert) for layer in checkpoint.moe_layers for expert in range(EXPERTS)]
    expected = {job: checkpoint.expert(*job).gate_up for job in jobs}
    fresh = Checkpoint(tmp_path)  # no file is open yet
    wrong: list[tuple[int, int]] = []

    def read() -> None:
        wrong.extend(job for job in jobs if not torch.equal(fresh.expert(*job).gate_up, expected[job]))

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert wrong == []
    assert not any(thread.is_alive() for thread in threads)


def test_the_identity_names_configuration_and_weights(tmp_path: Path) -> None:
    folder = build_family("olmoe", tmp_path / "a")
    identity = Checkpoint(folder).identity
    copy = Path(shutil.copytree(folder, tmp_path / "elsewhere"))
    assert Checkpoint(folder).identity == Checkpoint(copy).identity == identity
    assert Checkpoint(build_family("olmoe", tmp_path / "b", seed=1)).identity != identity
    edit_config(copy, rms_norm_eps=1e-3)
    assert Checkpoint(copy).identity != identity


@pytest.mark.parametrize("expert", [-1, EXPERTS])
def test_an_expert_out_of_range_is_named_with_its_bound(expert: int, tmp_path: Path) -> None:
    checkpoint = Checkpoint(build_family("qwen3_moe", tmp_path))
    with pytest.raises(ConfigError, match=f"expert {expert} of layer 1: the layer has experts 0 to 7"):
        checkpoint.expert(1, expert)


@pytest.mark.parametrize("layer", [0, 3, -1])
def test_a_dense_layer_or_one_out_of_range_is_named_with_the_layers_that_have_experts(
    layer: int, tmp_path: Path
) -> None:
    checkpoint = Checkpoint(build_family("deepseek_v3", tmp_path))
    with pytest.raises(ConfigError, match=rf"layer {layer} has no routed experts; .* \(1, 2\)"):
        checkpoint.expert(layer, 0)


UP = "model.layers.1.mlp.experts.3.up_proj.weight"
GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"


def checkpoint_error(folder: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(folder)
    return caught.value


def test_a_missing_tensor_names_the_key_of_the_expert_that_lacks_it(tmp_path: Path) -> None:
    folder = build_family("qwen3_moe", tmp_path)
    rewrite(folder, UP, lambda _: None)
    error = checkpoint_error(folder)
    assert (error.file, error.key) == (str(folder / INDEX_NAME), UP)
    assert (error.expected, error.found) == ("a tensor of expert 3", "no such tensor")


def test_a_missing_parameter_names_every_pattern_that_could_feed_it(tmp_path: Path) -> None:
    folder = build_family("qwen3_moe", tmp_path, packed=True)
    rewrite(folder, GATE_UP, lambda _: None)
    error = checkpoint_error(folder)
    assert error.key == GATE_UP
    assert GATE_UP in error.expected
    assert "mlp.experts.*.gate_proj.weight" in error.expected


def test_a_tensor_that_the_index_lists_and_its_shard_lacks_is_named(tmp_path: Path) -> None:
    folder = build_family("qwen3_moe", tmp_path)
    index = (folder / INDEX_NAME).read_text()
    shard = rewrite(folder, UP, lambda _: None)
    (folder / INDEX_NAME).write_text(index)
    error = checkpoint_error(folder)
    assert (error.file, error.key, error.found) == (str(shard), UP, "no such tensor in the shard")


def test_a_truncated_shard_names_file_and_key(tmp_path: Path) -> None:
    folder = build_family("qwen3_moe", tmp_path)
    shard = folder / json.loads((folder / INDEX_NAME).read_text())["weight_map"][UP]
    size = shard.stat().st_size
    with shard.open("r+b") as stream:
        stream.truncate(size - 100)
    error = checkpoint_error(folder)
    assert error.file == str(shard)
    assert error.key in load_keys(folder, shard)
    assert (error.expected, error.found) == (f"a shard of {size} bytes", f"{size - 100} bytes")


def load_keys(folder: Path, shard: Path) -> list[str]:
    return [
        key for key, file in json.loads((folder / INDEX_NAME).read_text())["weight_map"].items() if file == shard.name
    ]


@pytest.mark.parametrize("left", [0, 5, 40], ids=["empty", "no length", "half a header"])
def test_a_shard_cut_inside_its_header_names_file_and_a_key(left: int, tmp_path: Path) -> None:
    folder = build_family("qwen3_moe", tmp_path)
    shard = folder / json.loads((folder / INDEX_NAME).read_text())["weight_map"][UP]
    with shard.open("r+b") as stream:
        stream.truncate(left)
    error = checkpoint_error(folder)
    assert error.file == str(shard)
    assert error.key in load_keys(folder, shard)


def test_an_absent_shard_names_file_and_a_key(tmp_path: Path) -> None:
    folder = build_family("qwen3_moe", tmp_path)
    shard = folder / json.loads((folder / INDEX_NAME).read_text())["weight_map"][UP]
    shard.unlink()
    error = checkpoint_error(folder)
    assert (error.file, error.found) == (str(shard), "No such file or directory")
    assert error.key in load_keys(folder, shard)


def test_a_shard_that_is_cut_after_the_checkpoint_was_opened_fails_by_name(tmp_path: Path) -> None:
    folder = build_family("qwen3_moe", tmp_path)
    checkpoint = Checkpoint(folder)
    shard = folder / json.loads((folder / INDEX_NAME).read_text())["weight_map"][UP]
    with shard.open("r+b") as stream:
        stream.truncate(100)
    with pytest.raises(CheckpointError, match="as when the checkpoint was opened") as caught:
        checkpoint.expert(1, 3)
    assert caught.value.file == str(shard)


@pytest.mark.parametrize(
    ("key", "change", "expected", "found"),
    [
        (UP, lambda tensor: tensor[:, :60], "shape (48, 64)", "shape (48, 60)"),
        (UP, lambda tensor: tensor[:40], "shape (48, 64)", "shape (40, 64)"),
        (UP.replace("up_proj", "down_proj"), lambda tensor: tensor.t(), "shape (64, 48)", "shape (48, 64)"),
        (UP, lambda tensor: tensor[0], "shape (48, 64)", "shape (64,)"),
        (UP, lambda tensor: tensor.to(torch.bfloat16), "dtype torch.float32", "dtype torch.bfloat16"),
        (UP, lambda tensor: tensor.to(torch.int8), "dtype torch.float32", "dtype I8"),
        (UP, lambda tensor: tensor.to(torch.float8_e4m3fn), "dtype torch.float32", "dtype F8_E4M3"),
    ],
)
def test_a_wrong_shape_or_dtype_of_one_expert_is_named(
    key: str, change: Callable[[Tensor], Tensor], expected: str, found: str, tmp_path: Path
) -> None:
    folder = build_family("qwen3_moe", tmp_path)
    shard = rewrite(folder, key, change)
    error = checkpoint_error(folder)
    assert (error.file, error.key, error.expected, error.found) == (str(shard), key, expected, found)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda tensor: tensor[:7], (7, 96, 64)),
        (lambda tensor: tensor[:, :90], (8, 90, 64)),
        (lambda tensor: tensor.mT, (8, 64, 96)),
    ],
    ids=["too few experts", "too few rows", "transposed"],
)
def test_a_wrong_shape_of_a_packed_tensor_is_named(
    change: Callable[[Tensor], Tensor], found: tuple[int, ...], tmp_path: Path
) -> None:
    folder = build_family("qwen3_moe", tmp_path, packed=True)
    shard = rewrite(folder, GATE_UP, change)
    error = checkpoint_error(folder)
    assert (error.file, error.key) == (str(shard), GATE_UP)
    assert (error.expected, error.found) == ("shape (8, 96, 64)", f"shape {found}")


def test_more_experts_on_disk_than_configured_are_refused(tmp_path: Path) -> None:
    folder = build_family("qwen3_moe", tmp_path)
    edit_config(folder, num_local_experts=6)
    error = checkpoint_error(folder)
    assert ".experts.6." in error.key
    assert error.expected == "experts 0 to 5"


def test_a_dtype_that_the_configuration_does_not_declare_must_be_asked_for(tmp_path: Path) -> None:
    folder = build_family("mixtral", tmp_path)
    edit_config(folder, dtype="bfloat16")
    assert checkpoint_error(folder).found == "dtype torch.float32"
    assert Checkpoint(folder, dtype=torch.float32).dtype is torch.float32


def test_a_folder_without_safetensors_or_with_a_broken_index_is_named(tmp_path: Path) -> None:
    config = family_config("mixtral")
    config.save_pretrained(tmp_path)
    assert checkpoint_error(tmp_path).file == str(tmp_path)
    (tmp_path / INDEX_NAME).write_text("{")
    error = checkpoint_error(tmp_path)
    assert (error.file, error.key) == (str(tmp_path / INDEX_NAME), "weight_map")


def test_a_conversion_that_mixes_experts_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import conversion_mapping

    folder = build_family("qwen3_moe", tmp_path)
    mixing = WeightConverter(
        ["mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight"],
        "mlp.experts.gate_up_proj",
        [MergeModulelist(dim=1)],
    )
    monkeypatch.setitem(conversion_mapping._checkpoint_conversion_mapping_cache, "qwen3_moe", [mixing])
    with pytest.raises(UnsupportedModelError, match="mixes experts"):
        Checkpoint(folder)


@pytest.mark.parametrize(
    "broken",
    [
        {"gate_up": torch.zeros(7, 4), "down": torch.zeros(4, 3)},
        {"gate_up": torch.zeros(6, 4), "down": torch.zeros(3, 4)},
        {"gate_up": torch.zeros(6, 4), "down": torch.zeros(4, 3), "gate_up_bias": torch.zeros(6)},
        {"gate_up": torch.zeros(6, 4), "down": torch.zeros(4, 3, dtype=torch.float16)},
        {"gate_up": torch.zeros(4, 6).t(), "down": torch.zeros(4, 3)},
    ],
    ids=["odd rows", "transposed down", "one bias", "two dtypes", "strided"],
)
def test_expert_weights_that_do_not_fit_together_are_refused(broken: dict[str, Tensor]) -> None:
    with pytest.raises(ConfigError, match="expert weights"):
        ExpertWeights(**broken)


def test_a_layout_counts_the_bytes_of_its_weights() -> None:
    layout = ExpertLayout(hidden=8, ffn=6, has_bias=True)
    weights = ExpertWeights(torch.zeros(12, 8), torch.zeros(8, 6), torch.zeros(12), torch.zeros(8))
    assert weights.layout == layout
    assert weights.nbytes == layout.nbytes(torch.float32) == 4 * (96 + 48 + 12 + 8)
