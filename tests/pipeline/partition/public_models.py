"""Small models of transformers, timm and torchvision, and batches for them.

Importing these libraries takes seconds: it is done where they are used.
"""

import torch
from torch.nn.functional import cross_entropy

from benchmarks.harness.libraries import load

VOCABULARY, LENGTH, NUM_POSITIONS = 61, 12, 16
COMMON = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}


def build_gpt2(**options):
    """Return a GPT-2 of three blocks, the same one every time."""
    transformers = load("transformers")
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": NUM_POSITIONS}
    config = transformers.GPT2Config(**{**COMMON, **sizes, **options})
    return transformers.GPT2LMHeadModel(config)


def build_llama(**options):
    """Return a Llama of three blocks, the same one every time."""
    transformers = load("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    given = {**COMMON, **sizes, **heads, "max_position_embeddings": NUM_POSITIONS, **options}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**given))


def build_family(name, **options):
    """Return a small model of transformers, by a key of ``families.TRANSFORMERS``."""
    module, class_name = name.split(".")
    library = load(f"transformers.models.{module}.modeling_{module}")
    model_class = getattr(library, class_name)
    sizes = {
        **COMMON, "pad_token_id": 1, "num_labels": 3, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "max_position_embeddings": 18, "type_vocab_size": 2, "dim": 32, "n_layers": 3,
        "n_heads": 4, "hidden_dim": 48, "image_size": 16, "patch_size": 8, "num_local_experts": 4,
        "sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1, **options,
    }  # fmt: skip
    defaults = model_class.config_class()
    own = {key: value for key, value in sizes.items() if hasattr(defaults, key)}
    torch.manual_seed(0)
    return model_class(model_class.config_class(**own))


def build_qwen2(**options):
    """Return a Qwen2 of three blocks, two of them with a sliding window."""
    return build_family("qwen2.Qwen2ForCausalLM", pad_token_id=None, **options)


def build_mistral(**options):
    """Return a Mistral of three blocks, all with a sliding window."""
    return build_family("mistral.MistralForCausalLM", pad_token_id=None, **options)


LANGUAGE_MODELS = {"GPT-2": build_gpt2, "Llama": build_llama}
WITH_WINDOWS = {"Qwen2": build_qwen2, "Mistral": build_mistral}


def build_ids(samples=4):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(VOCABULARY, (samples, LENGTH), generator=generator)


def padded(ids):
    """Return a mask of some padding on the left, and the position ids that fit it."""
    mask = torch.ones_like(ids)
    mask[::2, :3] = 0
    return {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


def next_token_loss(logits, ids):
    return cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


TIMM = {
    "basic": ("BasicBlock", {}),
    "bottleneck": ("Bottleneck", {"stem_width": 32, "stem_type": "deep"}),
    "dropout": ("BasicBlock", {"drop_rate": 0.5, "drop_path_rate": 0.5}),
    "recomputed": ("BasicBlock", {"drop_path_rate": 0.5}),
    "average": ("BasicBlock", {"avg_down": True, "replace_stem_pool": True}),
}


def build_timm(kind="basic"):
    """Return timm's ResNet of five blocks."""
    resnet = load("timm.models.resnet")
    block, options = TIMM[kind]
    sizes = {"num_classes": 5, "channels": (8, 16, 24, 32), "zero_init_last": False}
    torch.manual_seed(0)
    return resnet.ResNet(getattr(resnet, block), (2, 1, 1, 1), **sizes, **options)


def build_torchvision():
    """Return torchvision's ResNet of five blocks."""
    resnet = load("torchvision.models.resnet")
    torch.manual_seed(0)
    return resnet.ResNet(resnet.BasicBlock, [2, 1, 1, 1], num_classes=5)
