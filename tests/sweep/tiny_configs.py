"""A tiny config of any model type of transformers, by rules on the names of its settings.

Every default config is shrunk as a tree of settings: layers, widths, heads, vocabularies, images and experts become
small, all at once and by one rule each. Four schemes are tried in turn, and the first whose model can be built and run
is taken:

    even     all widths are 64, all heads 4 of 16 numbers: sub-configs that must agree do
    filled   the same, and what is None by default has a value: sizes, the sections of a head's rotary positions
    scaled   all widths are divided by one power of two, heads keep their number: stages keep their ratios
    shallow  widths stay, only layers, vocabularies and experts shrink
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, TypeAlias

Scheme: TypeAlias = Literal["even", "filled", "scaled", "shallow"]
SCHEMES: tuple[Scheme, ...] = ("even", "filled", "scaled", "shallow")

VOCABULARY = 320
WORDS = 240
"""Ids from here on are special ones of the config: places of images, marks of beginnings and ends."""
_WIDTH, _HEADS, _GROUPS, _HEAD, _INNER, _EXPERTS = 64, 4, 2, 16, 96, 4


def _names(text: str, *, prefixed: bool = True) -> re.Pattern[str]:
    """Settings of these names; ``prefixed``: also behind a word, such as "encoder_"."""
    return re.compile((r"(\w+_)?" if prefixed else "") + f"({'|'.join(text.split())})")


_LAYER_COUNT = _names(
    "num_hidden_layers num_layers n_layers? hidden_layers layers depth num_blocks? num_layers_per_stack"
)
_NO_LAYER_COUNT = re.compile(
    r"(max_window|num_kv_shared|num_feat_extract|num_conv|num_dense|subsample|moe|proj)\w*|num_adapter_layers"
)
_WIDTHS = _names(
    """hidden_size d_model embed_dim embedding_dim embed_dims hidden_sizes n_embd embedding_size emb_dim hidden_dim
    embed_proj_dim projection_dim project_dim projection_size hidden_size_global model_dim feature_dim output_size
    proj_size hidden_channels fpn_size codevector_dim encoder_in_channels decoder_in_channels projector_dim dim width
    projection_hidden_dim out_hidden_size pooler_output_size encoder_hidden decoder_hidden vision_output_dim
    text_hidden_size conv_dim tdnn_dim xvector_output_dim neck_hidden_sizes embed_dim_per_stage backbone_channel_list
    image_text_hidden_size dim_model lru_width text_embed_dim out_dim adapter_out_dim adapter_in_dim""",
)
_FIXED_WIDTHS = re.compile(r"(ple_|unit_|lang_|spkr_)embed_dim|mask_input_channels|moe_\w+|shared_\w+")
_INNERS = _names(
    """intermediate_size ffn_dim ffn_hidden_size mlp_dim d_ff dff d_inner feed_forward feedforward_dim linear_units
    intermediate_dim feed_forward_hidden_size mlp_hidden_size intermediate_size_mlp n_inner ff_dim dim_ff
    dim_feedforward alignment_intermediate_size inner_dim"""
)
_HEAD_COUNT = _names(
    """num_attention_heads attention_heads num_heads n_heads? num_attention_heads_per_stage linear_num_value_heads
    linear_num_heads mamba_num_heads mamba_n_heads"""
)
_GROUP_COUNT = _names("num_key_value_heads num_kv_heads n_kv_heads linear_num_key_heads num_key_value_groups")
_HEAD_DIMS = _names(
    """head_dim d_kv d_head head_size attention_head_size attention_head_dim qk_head_dim kv_channels key_length
    dim_head"""
)
_HALF_HEADS = _names("qk_rope_head_dim qk_nope_head_dim rotary_dim rope_head_dim")
_RANKS = re.compile(r"\w*lora_rank|gated_norm_rank|time_step_rank|mamba_dt_rank")
_VOCABULARIES = _names(
    """vocab_size vocabulary_size codebook_size num_embeddings vocab_size_per_layer_input encoder_hash_byte_group_vocab
    num_hash_buckets num_bpe_labels num_wordpiece_labels"""
)
_SPECIAL = re.compile(r"_?\w*(token_ids?|token_index|_id|_ids)")
_EXPERT_COUNT = re.compile(r"(num|n|moe_num)_(\w*_)?experts")
_PLACES = re.compile(r"ind(ices|exes|exs)$|idxs?$|_levels$|_layers$|_ids$|hook_ids$|_blocks$")
_POSITIONS = _names(
    "max_position_embeddings max_source_positions max_target_positions n_positions n_ctx max_seq_len", prefixed=False
)

_RESNET = {"embedding_size": 16, "hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1], "out_indices": [2, 3, 4]}
_LEFT_OUT = ("transformers_version", "architectures", "dtype", "_name_or_path", "id2label", "label2id",
             "out_features", "stage_names", "quantization_config")  # fmt: skip

Rule: TypeAlias = Callable[[int], int]

_UNSET: dict[str, int] = {
    "head_dim": _HEAD, "num_key_value_heads": _HEADS, "vocab_size": VOCABULARY, "num_experts_per_tok": 2,
    "prediction_length": 4, "context_length": 12, "moe_intermediate_size": _INNER, "num_experts": _EXPERTS,
    "top_k_experts": 2, "topk_group": 1, "sliding_window": 8, "indexer_head_dim": _HEAD, "indexer_kv_heads": 1,
    "indexer_n_heads": 2,
}  # fmt: skip
"""Settings that are None by default, of model types that cannot be built with None."""

# What no rule on names can know: a reason, and settings by path that replace those of the rules.
_ROPE = {"rope_theta": 1e4, "rope_type": "default"}
_ROPES = {"full_attention": _ROPE, "sliding_attention": _ROPE}
EXCEPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere_compass": ("the default has no rotary settings", {"text_config.rope_parameters": _ROPES}),
    "cohere_compass_text": ("the default has no rotary settings", {"rope_parameters": _ROPES}),
    "dbrx": ("the defaults lack them", {"attn_config.rope_theta": 1e4, "attn_config.clip_qkv": 8.0}),
    "inkling2": ("the default is quantized", {"quantization_config": None}),
    "lfm2_moe": ("no kinds of layers by default", {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}),
    "bamba": ("no layer of attention by default", {"attn_layer_indices": [1], "num_hidden_layers": 2}),
    "granitemoehybrid": (
        "no layer of attention by default", {"layer_types": ["mamba", "attention"], "num_hidden_layers": 2},
    ),
    "recurrent_gemma": ("two kinds of layers, the second at the third place", {"num_hidden_layers": 3}),
    "gemma4_assistant": ("the default is refused", {"text_config.hidden_size_per_layer_input": 0}),
    "reformer": (
        "trains on one length, that of all its positions, in whole chunks",
        {"axial_pos_shape": [2, 4], "axial_pos_embds_dim": [32, 32], "max_position_embeddings": 8,
         "lsh_attn_chunk_length": 4, "local_attn_chunk_length": 4},
    ),
    "patchtsmixer": ("so narrow by default that nothing can be compressed", {"d_model": 64}),
    "qwen2_5_omni_thinker": ("the default lacks it, checkpoints have it", {"vision_start_token_id": WORDS + 1}),
    "qwen3_omni_moe_thinker": ("the default lacks it, checkpoints have it", {"vision_start_token_id": WORDS + 1}),
    "xmod": ("a default language must be named", {"default_language": "en_XX"}),
}  # fmt: skip
"""By model type."""


class Shrinking:
    """One shrinking of a tree of settings: what its parts must agree on is decided once."""

    def __init__(self, tree: Mapping[str, Any], scheme: Scheme) -> None:
        self._scheme, self._even = scheme, scheme in ("even", "filled")
        ids = {i for key, value in _settings(tree) if _SPECIAL.fullmatch(key) for i in _numbers(value) if i >= WORDS}
        self._ids = {one: VOCABULARY - len(ids) + place for place, one in enumerate(sorted(ids))}
        widths = [w for key, value in _settings(tree) if _WIDTHS.fullmatch(key) for w in _numbers(value)]
        self._ratio = 1
        while widths and max(widths) > 128 * self._ratio:
            self._ratio *= 2

    def tree(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The shrunk settings of a config, its sub-configs too."""
        layers = next((v for k, v in settings.items() if self._counts_layers(k) and isinstance(v, int)), 0)
        kept = _kept_layers(settings, layers)
        made = {}
        for key, value in settings.items():
            if key in _LEFT_OUT:
                continue
            if isinstance(value, Mapping) and not all(isinstance(name, str) for name in value):
                made[key] = value
            elif isinstance(value, Mapping) and value and all(name.isdigit() for name in value):
                made[key] = {str(kept.index(int(name))): self.tree(value[name]) for name in value if int(name) in kept}
            elif isinstance(value, Mapping) and value.get("model_type") == "timm_backbone":
                made[key] = {"model_type": "resnet", **_RESNET}  # another package has the default one
            elif isinstance(value, Mapping):
                made[key] = self._rope(value) if key.startswith("rope") else self.tree(value)
            elif isinstance(value, list | tuple) and value and all(isinstance(one, Mapping) for one in value):
                made[key] = [self.tree(one) for one in value]
            elif isinstance(value, list | tuple) and layers > 4 and len(value) == layers:
                made[key] = self._width(key, [value[place] for place in kept])
            elif key == "num_key_value_heads" and "kv_lora_rank" in settings and self._even:
                made[key] = _HEADS  # keys and values of latent attention have all heads
            elif value is None and key in _UNSET and self._scheme == "filled":
                made[key] = _UNSET[key]
            elif isinstance(value, bool) or value is None or isinstance(value, str | float):
                made[key] = value
            else:
                made[key] = self._value(key, value, settings, len(kept) if layers else 0)
        return made

    def _counts_layers(self, key: str) -> bool:
        return _LAYER_COUNT.fullmatch(key) is not None and _NO_LAYER_COUNT.fullmatch(key) is None

    @staticmethod
    def _climbs(value: Any) -> bool:
        """Whether it is a list of places, not of sizes: each is larger than the one before."""
        return isinstance(value, list | tuple) and list(value) == sorted(set(_numbers(value)))

    def _value(self, key: str, value: Any, settings: Mapping[str, Any], layers: int) -> Any:
        if _SPECIAL.fullmatch(key):
            return _each(value, lambda one: self._ids.get(one, one))
        if _VOCABULARIES.fullmatch(key):
            return _each(value, lambda one: min(one, VOCABULARY if "vocab" in key else 64))
        if self._counts_layers(key) and isinstance(value, int):
            return min(value, max(layers, 1))
        if _PLACES.search(key) and self._climbs(value):
            first = layers - len(value) + key.startswith(("out", "backbone_out"))
            return list(range(first, first + len(value))) if 0 < len(value) <= layers else value
        if key in ("depths", "num_block_repeats", "blocks_per_stage", "block_sizes"):
            return [min(one, 2) for one in value]
        if _POSITIONS.fullmatch(key):
            return min(value, 256) if isinstance(value, int) else value
        if _EXPERT_COUNT.fullmatch(key):
            return _each(value, lambda one: min(one, _EXPERTS))
        if key in (
            "num_experts_per_tok",
            "top_k",
            "moe_k",
            "num_selected_experts",
            "moe_topk",
            "num_experts_per_token",
        ):
            return _each(value, lambda one: min(one, 2))
        if key in ("n_group", "topk_group"):
            return _each(value, lambda one: min(one, 1))
        if key == "num_kv_shared_layers":
            return 0
        if key.endswith(("_layer_period", "_layer_offset")):
            return min(value, 2 if key.endswith("period") else 1)
        if key.startswith("window_size") and self._scheme != "shallow":
            return _each(value, lambda one: min(one, 2))
        if key == "image_size":
            return self._image(value, settings)
        return self._width(key, value)

    def _width(self, key: str, value: Any) -> Any:
        even = self._even
        if self._scheme == "shallow" or (_FIXED_WIDTHS.fullmatch(key) and not _INNERS.fullmatch(key)):
            return value
        if isinstance(value, list | tuple):
            largest = max(_numbers(value), default=0)
            if (_WIDTHS.fullmatch(key) or _INNERS.fullmatch(key) or "channels" in key) and largest > 16:
                ratio = 1
                while largest > 128 * ratio:
                    ratio *= 2
                return _each(value, lambda one: max(1, one // (ratio if even else self._ratio)))
            return value
        if key in ("mamba_n_heads", "mamba_num_heads") and even:
            return 2 * _WIDTH // _HEAD  # twice as wide inside
        if key in ("num_filters", "num_quantizers", "encoder_num_filters", "decoder_num_filters"):
            return min(value, 4)
        if key == "upsample_groups":
            return _WIDTH if even else self._scaled(value)
        if _HEAD_COUNT.fullmatch(key):
            return min(value, _HEADS) if even else value
        if _GROUP_COUNT.fullmatch(key):
            return min(value, _GROUPS) if even else value
        if _HALF_HEADS.fullmatch(key):
            return min(value, _HEAD // 2) if even else self._scaled(value)
        if _HEAD_DIMS.fullmatch(key):
            return min(value, _HEAD) if even else self._scaled(value)
        if _RANKS.fullmatch(key):
            return min(value, _HEAD) if even else self._scaled(value)
        if _INNERS.fullmatch(key):
            return min(value, _INNER) if even else self._scaled(value)
        if _WIDTHS.fullmatch(key):
            return (_WIDTH if value > 8 else value) if even else self._scaled(value)
        return value

    def _scaled(self, value: int) -> int:
        return max(2, value // self._ratio) if value > 0 else value

    def _image(self, value: Any, settings: Mapping[str, Any]) -> Any:
        patch = settings.get("patch_size")
        side = max(_numbers(patch), default=1) if patch is not None else 1
        return _each(value, lambda one: min(one, 4 * side if side >= 8 else 64))

    def _rope(self, value: Mapping[str, Any]) -> dict[str, Any]:
        made = {key: self._rope(one) if isinstance(one, Mapping) else one for key, one in value.items()}
        for key in ("short_factor", "long_factor"):
            if isinstance(made.get(key), list) and self._scheme != "shallow":
                made[key] = made[key][: _HEAD // 2]
        if self._even and ("mrope_section" in made or self._scheme == "filled") and "rope_type" in made:
            half = int(_HEAD * made.get("partial_rotary_factor", 1.0)) // 2
            made["mrope_section"] = [half - 2 * (half // 4), half // 4, half // 4]
        return made


def _kept_layers(settings: Mapping[str, Any], layers: int) -> list[int]:
    """The first layer of each kind, by every setting that has a value for each layer."""
    mixed = any(key.startswith("first_k_dense") or key.endswith("_layer_period") for key in settings)
    kept = {0, 1} if mixed and layers > 1 else {0}
    for value in settings.values():
        if isinstance(value, list | tuple) and layers > 4 and len(value) == layers:
            kept |= {value.index(one) for one in value if isinstance(one, str | bool | int)}
    for key, value in settings.items():
        if _PLACES.search(key) and isinstance(value, list | tuple) and 1 < len(value) <= min(6, layers):
            kept |= set(range(len(value)))
        if isinstance(value, Mapping) and value and all(isinstance(one, str) and one.isdigit() for one in value):
            kept |= {int(min(value, key=int))}
    return sorted(kept)[:6]


def _settings(tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _settings(value)
        elif isinstance(key, str):
            yield key, value


def _numbers(value: Any) -> list[int]:
    if isinstance(value, bool):
        return []
    if isinstance(value, int):
        return [value]
    return [number for one in value for number in _numbers(one)] if isinstance(value, list | tuple) else []


def _each(value: Any, rule: Rule) -> Any:
    if isinstance(value, list | tuple):
        return [_each(one, rule) for one in value]
    return rule(value) if isinstance(value, int) and not isinstance(value, bool) else value


def tiny_config(model_type: str, scheme: Scheme) -> Any:
    """The config of a model type, shrunk by one scheme, exceptions applied."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    made = Shrinking(tree := kind().to_dict(), scheme).tree(tree)
    for path, value in EXCEPTIONS.get(model_type, ("", {}))[1].items():
        *outer, last = path.split(".")
        place = made
        for name in outer:
            place = place[name]
        place[last] = value
    if made.get("is_encoder_decoder"):
        made.setdefault("decoder_start_token_id", 0)  # T5's is in the folders of the hub, not in the class
    return kind.from_dict(made)
