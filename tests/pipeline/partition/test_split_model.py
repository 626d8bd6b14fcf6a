"""The layers of Hugging Face models and ResNets compute what the whole model computes."""

import copy
import inspect
import re
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.harness.libraries import load
from pyparallel.pipeline import ModelParts, PipelineTrainer, PipeOptim, SplitModel, split_model
from pyparallel.pipeline.partition.families import TRANSFORMERS
from tests.cases import slow
from tests.pipeline.partition.public_models import (
    LANGUAGE_MODELS,
    LENGTH,
    TIMM,
    VOCABULARY,
    build_family,
    build_gpt2,
    build_ids,
    build_llama,
    build_timm,
    build_torchvision,
    next_token_loss,
    padded,
)


@cache
def arguments():
    """Return keyword arguments besides the input ids, by name."""
    right = torch.ones(4, LENGTH, dtype=torch.int64)
    right[1, -4:], right[3, -1:] = 0, 0
    packed = torch.arange(LENGTH).repeat(4, 1)
    packed[:, 5:] -= 5
    return {
        "nothing": {},
        "no padding": {"attention_mask": torch.ones_like(right)},
        "left padding": padded(build_ids()),
        "right padding": {"attention_mask": right},
        "bool mask": {"attention_mask": right.bool()},
        "packed sequences": {"position_ids": packed},
    }


def run(layers, *args, **kwargs):
    value = layers[0](*args, **kwargs)
    for layer in layers[1:]:
        value = layer(value)
    return value


def gradients_of(model, output):
    """Return the gradients of a loss, which leaves none behind."""
    output.float().square().mean().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return gradients


def assert_same(model, wanted, found):
    """Compare outputs and gradients, bitwise."""
    assert wanted.isfinite().all()
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    expected, own = gradients_of(model, wanted), gradients_of(model, found)
    assert expected
    torch.testing.assert_close(own, expected, rtol=0, atol=0)


FAST = {"qwen2.Qwen2ForSequenceClassification", "bert.BertForSequenceClassification"}
FAST |= {"gemma2.Gemma2ForCausalLM", "vit.ViTForImageClassification"}


@pytest.mark.parametrize("name", [each if each in FAST else slow(each) for each in TRANSFORMERS])
def test_layers_compute_what_each_family_computes(name, subtests):
    only_eager = {"attn_implementation": "eager"} if "gemma2" in name else {}
    model = build_family(name, **only_eager)
    layers = split_model(model)
    assert len(layers) == 5
    ids = build_ids().clamp(min=2)
    right = arguments()["right padding"]["attention_mask"]
    cases = [{"input_ids": ids}]
    for mask in (right, padded(ids)["attention_mask"]):
        cases.append({"input_ids": ids.where(mask == 1, 1), "attention_mask": mask})
    options = {}
    if name == "vit.ViTForImageClassification":
        cases = [{"pixel_values": torch.randn(2, 3, 16, 16)}]
    else:
        cases.append({"inputs_embeds": model.get_input_embeddings()(ids).detach()})
    if "use_cache" in inspect.signature(model.forward).parameters:  # of decoders
        options = {"use_cache": False}
        cases.append({"input_ids": ids, **arguments()["packed sequences"]})
    for given in cases:
        with subtests.test(given=list(given)):
            torch.manual_seed(2)
            wanted = model(**given, **options).logits
            torch.manual_seed(2)
            found = run(layers, **given)
            assert wanted.isfinite().all()
            torch.testing.assert_close(found, wanted, rtol=0, atol=0)
            torch.testing.assert_close(
                gradients_of(model, found), gradients_of(model, wanted), rtol=0, atol=0
            )


def test_the_page_lists_every_family():
    page = Path("docs/how_to/hugging_face.md").read_text()
    for name in TRANSFORMERS:
        family = name.split(".")[1].partition("For")[0]
        assert re.search(rf"\b{family}(For\w+)?\b", page), name


def call_both(model, layers, *args, **kwargs):
    """Return the output of the model and of its layers, with the same random numbers."""
    torch.manual_seed(2)
    wanted = model(*args, **kwargs, use_cache=False).logits
    torch.manual_seed(2)
    return wanted, run(layers, *args, **kwargs)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", LANGUAGE_MODELS)
def test_layers_compute_what_the_language_model_computes(family, attention, subtests):
    model = LANGUAGE_MODELS[family](attn_implementation=attention)
    layers = split_model(model)
    assert isinstance(layers, SplitModel)
    assert layers.model is model
    assert len(layers) == 5
    for name, given in arguments().items():
        with subtests.test(arguments=name):
            assert_same(model, *call_both(model, layers, input_ids=build_ids(), **given))
    embedded = model.get_input_embeddings()(build_ids()).detach()
    assert_same(model, *call_both(model, layers, inputs_embeds=embedded))
    model.double()
    assert_same(model, *call_both(model, layers, build_ids()))


def test_token_types_of_gpt2_are_embedded():
    model = build_gpt2()
    layers, types = split_model(model), build_ids().flip(0)
    assert_same(model, *call_both(model, layers, input_ids=build_ids(), token_type_ids=types))
    without = run(layers, build_ids())
    assert not torch.equal(without, run(layers, build_ids(), None, types))  # positional


@pytest.mark.parametrize("family", LANGUAGE_MODELS)
def test_the_modules_and_parameters_are_the_models_own(family):
    model = LANGUAGE_MODELS[family](tie_word_embeddings=True)
    layers = split_model(model)
    own = {id(parameter) for parameter in model.parameters()}
    held = [{id(parameter) for parameter in layer.parameters()} for layer in layers]
    assert set().union(*held) == own
    (tied,) = held[0] & held[-1]
    assert tied == id(model.get_input_embeddings().weight)
    assert sum(map(len, held)) == len(own) + 1  # the tie alone is in two layers


DROPPED = {
    "GPT-2": {"attn_pdrop": 0.2, "resid_pdrop": 0.2, "embd_pdrop": 0.2},
    "Llama": {"attention_dropout": 0.2},
}


@pytest.mark.parametrize("family", LANGUAGE_MODELS)
def test_dropout_and_recomputation(family, subtests):
    model = LANGUAGE_MODELS[family](**DROPPED[family])
    layers, given = split_model(model), arguments()["left padding"]
    model.train()
    for reentrant in (None, False, True):
        with subtests.test(reentrant=reentrant):
            if reentrant is not None:
                model.activation_checkpointing_enable({"use_reentrant": reentrant})
            wanted, found = call_both(model, layers, input_ids=build_ids(), **given)
            assert_same(model, wanted, found)
    model.eval()
    assert not torch.equal(found, run(layers, input_ids=build_ids(), **given))


@pytest.mark.parametrize("family", LANGUAGE_MODELS)
def test_bfloat16_float16_and_autocast(family, subtests):
    model, given = LANGUAGE_MODELS[family](), arguments()["left padding"]
    layers = split_model(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(model, *call_both(model, layers, input_ids=build_ids(), **given))
    for dtype in (torch.bfloat16, torch.float16):
        with subtests.test(dtype=dtype):
            model.to(dtype)
            wanted, found = call_both(model, layers, input_ids=build_ids(), **given)
            assert found.dtype == dtype
            assert_same(model, wanted, found)


def test_the_blocks_of_a_stage_share_the_mask_and_the_rotary_embeddings():
    model = build_llama()
    layers, calls = split_model(model), []
    model.model.rotary_emb.register_forward_hook(lambda *_: calls.append(1))
    first, second = (arguments()[name] for name in ("left padding", "packed sequences"))
    ids = build_ids()

    def as_message(value):
        return tuple(each.detach().clone() for each in value)

    # Two stages, with two microbatches in flight: none reads what another one has computed.
    values = [run(layers[:3], ids, **given) for given in (first, second)]
    assert len(calls) == 2
    values = [run(layers[3:], as_message(value)) for value in values]
    assert len(calls) == 4
    for value, given in zip(values, (first, second), strict=True):
        wanted = model(input_ids=ids, use_cache=False, **given).logits
        torch.testing.assert_close(value, wanted, rtol=0, atol=0)


def test_what_travels_between_layers_is_small():
    layers = split_model(build_llama())
    hidden = layers[0](build_ids())
    assert isinstance(hidden, torch.Tensor)
    assert layers[1](hidden).shape == (4, LENGTH, 32)
    given = arguments()["left padding"]
    _, mask, positions = layers[1](layers[0](build_ids(), **given))
    assert (mask.dtype, positions.dtype) == (torch.bool, torch.int64)
    torch.testing.assert_close(mask, given["attention_mask"].bool())
    torch.testing.assert_close(positions, given["position_ids"])


@pytest.mark.slow  # the compiler is loaded, for seconds
def test_layers_compile_without_graph_breaks():
    layers, given = split_model(build_llama()), padded(build_ids())
    value = tuple(each.detach() for each in layers[0](build_ids(), **given))
    stage = nn.Sequential(*layers[1:3])
    compiled = torch.compile(stage, backend="aot_eager", fullgraph=True)
    for found, wanted in zip(compiled(value), stage(value), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


IDS = build_ids()
IDS[0, :2] = torch.tensor([0, VOCABULARY - 1])
MASK = torch.ones(4, LENGTH, dtype=torch.int64)
REFUSED = [
    ({}, "inputs must hold one of input_ids and inputs_embeds, got none"),
    (
        {"input_ids": IDS, "inputs_embeds": torch.zeros(4, LENGTH, 32)},
        r"one of input_ids and inputs_embeds, got \['input_ids', 'inputs_embeds'\]",
    ),
    ({"input_ids": IDS[0]}, r"input_ids must be of shape \(batch, sequence\), got \[12\]"),
    ({"input_ids": IDS.float()}, "input_ids must be int64 or int32, got torch.float32"),
    ({"input_ids": (IDS, MASK)}, "input_ids must be a tensor, got a tuple .*as a list or by name"),
    ({"input_ids": IDS + 1}, "input_ids must be from 0 to 60, got 1 to 61"),
    ({"input_ids": IDS - 1}, "input_ids must be from 0 to 60, got -1 to 59"),
    (
        {"input_ids": IDS, "attention_mask": MASK[:, 1:]},
        r"attention_mask must be of shape \(batch, sequence\) as input_ids, \[4, 12\], got "
        r"\[4, 11\]; blocks make the causal mask themselves",
    ),
    (
        {"input_ids": IDS, "attention_mask": MASK[:, None, None]},
        r"as input_ids, \[4, 12\], got \[4, 1, 1, 12\]",
    ),
    ({"input_ids": IDS, "attention_mask": [1]}, "attention_mask must be a tensor, got a list"),
    (
        {"input_ids": IDS, "position_ids": torch.arange(LENGTH)},
        r"position_ids must be of shape \(batch, sequence\) as input_ids, \[4, 12\], got \[12\]",
    ),
    (
        {"inputs_embeds": torch.zeros(4, LENGTH, 31)},
        r"inputs_embeds must be of shape \(batch, sequence, 32\), got \[4, 12, 31\]",
    ),
    ({"inputs_embeds": IDS}, "inputs_embeds must be of floating-point numbers, got torch.int64"),
    (
        {"input_ids": IDS, "labels": IDS},
        r"labels must not be given .*got a tensor of shape \[4, 12\] .*; give step\(\) the target",
    ),
    ({"input_ids": IDS, "use_cache": True}, "use_cache must not be .*got True; .*model.generate"),
    ({"input_ids": IDS, "output_attentions": True}, "output_attentions must not be .*hooks"),
    ({"input_ids": IDS, "attn_mask": MASK}, "attn_mask must not be .*it takes input_ids, atten"),
]
REFUSED_BY_GPT2 = [
    ({"input_ids": IDS, "position_ids": IDS}, "position_ids must be from 0 to 15, got 0 to 60"),
    (
        {"input_ids": torch.zeros(4, 17, dtype=torch.int64)},
        "input_ids must be of at most 16 positions, .*got sequences of 17",
    ),
    ({"input_ids": IDS, "token_type_ids": IDS + 1}, "token_type_ids must be from 0 to 60"),
]


@pytest.mark.parametrize("family", LANGUAGE_MODELS)
def test_invalid_inputs_are_found_before_they_are_sent(family, subtests):
    first = split_model(LANGUAGE_MODELS[family]().eval())[0]
    for given in arguments().values():
        assert first.find_input_error(IDS, **given) is None
    left_out = {"labels": None, "use_cache": False, "attention_mask": None}
    assert first.find_input_error(input_ids=IDS, **left_out) is None
    torch.testing.assert_close(first(IDS, **left_out), first(IDS))
    for given, message in REFUSED + (REFUSED_BY_GPT2 if family == "GPT-2" else []):
        with subtests.test(message=message):
            found = first.find_input_error(**given)
            assert found is not None
            with pytest.raises(ValueError, match=message):
                raise ValueError(found)
    assert "too many positional arguments" in first.find_input_error(*[IDS] * 6)
    with pytest.raises(ValueError, match="attn_mask must not be given"):
        first(IDS, attn_mask=MASK)


def test_models_that_cannot_be_split_are_refused():
    transformers, config = load("transformers"), build_llama().config

    class OwnForward(transformers.LlamaForCausalLM):
        def forward(self, input_ids):
            return super().forward(input_ids).logits * 2

    class SameForward(transformers.LlamaForCausalLM):
        pass

    assert len(split_model(SameForward(config))) == 5
    others = [
        (transformers.GPT2ForTokenClassification(build_gpt2().config), "GPT2ForTokenClassif"),
        (OwnForward(config), "with the forward of that class, got .*OwnForward; say where"),
        (nn.Linear(2, 2), r"one of .*GPT2LMHeadModel, .*got torch.nn.*Linear; .*\n.*ModelParts\("),
        (build_llama, "got builtins.function"),
    ]
    for model, message in others:
        with pytest.raises(TypeError, match=message):
            split_model(model)
    with pytest.raises(ValueError, match=r"add_cross_attention must be False .*got True"):
        split_model(build_gpt2(add_cross_attention=True))
    for name, value in (("is_encoder_decoder", True), ("is_causal", False)):
        model = build_llama()
        setattr(model.config, name, value)
        with pytest.raises(ValueError, match=rf"model.config.{name} must be .*got {value}"):
            split_model(model)


class OwnModel(nn.Module):
    """A model that no family has, with the names of nobody else."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.body = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(4, 4) for _ in range(3))})
        self.out = nn.Linear(4, 8)

    def forward(self, ids):
        hidden = self.embed(ids)
        for block in self.body["blocks"]:
            hidden = block(hidden)
        return self.out(hidden.tanh())


def test_a_model_of_ones_own_is_described_by_its_parts():
    model, ids = OwnModel(), torch.arange(8).view(2, 4)
    layers = split_model(model, ModelParts("embed", "body.blocks", [torch.tanh, "out"]))
    assert len(layers) == 5
    assert_same(model, model(ids), run(layers, ids))
    wrong = [
        (
            ModelParts("embedding", "body.blocks", "out"),
            "embedding must be .*has no attribute 'embeddi",
        ),
        (ModelParts("embed", "body.blocks", "forward"), "head must be .*got 'forward', a method"),
        (
            ModelParts("embed", "body.blocks", "out", attention="causal"),
            "attention must be None for",
        ),
    ]
    for parts, message in wrong:
        with pytest.raises(ValueError, match=message):
            split_model(model, parts)
    with pytest.raises(TypeError, match="parts must be a ModelParts"):
        split_model(model, "embed")
    with pytest.raises(ValueError, match="attention must be 'causal' or 'bidirectional' with rot"):
        ModelParts("embed", "blocks", "out", rotary="rotary")


def test_the_parts_of_a_decoder_of_transformers_can_be_given():
    class OwnForward(load("transformers").LlamaForCausalLM):
        def forward(self, input_ids, position_ids=None):
            return super().forward(input_ids, position_ids=position_ids, use_cache=False)

    model = OwnForward(build_llama().config)
    parts = ModelParts(
        "model.embed_tokens", "model.layers", ["model.norm", "lm_head"],
        attention="causal", rotary="model.rotary_emb",
    )  # fmt: skip
    layers = split_model(model, parts)
    assert_same(model, model(build_ids()).logits, run(layers, build_ids()))
    packed = arguments()["packed sequences"]
    assert_same(model, model(build_ids(), **packed).logits, run(layers, build_ids(), **packed))
    assert "it takes input_ids and position_ids" in layers[0].find_input_error(IDS, mask=1)


def test_sequence_classification_needs_the_id_of_the_padding():
    model = build_family("qwen2.Qwen2ForSequenceClassification", pad_token_id=None)
    with pytest.raises(ValueError, match=r"pad_token_id must be that of .*got None"):
        split_model(model)


def test_blocks_of_a_configuration_that_they_do_not_have_are_refused():
    for name, value, message in (
        ("layer_types", ["linear_attention"] * 3, "layer_types must be .*got 'linear_attention'"),
        ("layer_types", ["full_attention"], "must describe each of its blocks, got 1 layer_types"),
    ):
        model = build_llama()
        setattr(model.config, name, value)
        with pytest.raises(ValueError, match=message):
            split_model(model)


@pytest.mark.parametrize("family", LANGUAGE_MODELS)
def test_the_whole_model_is_trained_in_place(family, tmp_path):
    model = LANGUAGE_MODELS[family]()
    before, ids = copy.deepcopy(model.state_dict()), build_ids(8)
    optimizer_fn = partial(torch.optim.AdamW, lr=0.01)
    trainer = PipelineTrainer(
        split_model(model), next_token_loss, optimizer_fn, PipeOptim(), num_microbatches=4, split=[]
    )
    losses = [trainer.step({"input_ids": ids}, ids) for _ in range(5)]
    trainer.flush()
    assert losses[-1] < losses[0]
    assert all(not torch.equal(before[name], p) for name, p in model.named_parameters())
    model.eval()
    assert next_token_loss(model(ids).logits, ids).item() == pytest.approx(
        trainer.evaluate({"input_ids": ids}, ids), rel=1e-6
    )
    prompt = ids[:1, :4]
    generated = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4)
    assert generated.shape[1] > 4
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("kind", [*TIMM, "torchvision"])
def test_layers_compute_what_the_resnet_computes(kind):
    model = build_torchvision() if kind == "torchvision" else build_timm(kind)
    if kind == "recomputed":
        model.set_grad_checkpointing()
    other = copy.deepcopy(model)
    layers = split_model(other)
    assert len(layers) == 7
    images = torch.randn(4, 3, 33, 33)
    outputs = []
    for call in (model, partial(run, layers)):
        torch.manual_seed(3)
        outputs.append(call(images))
    wanted, found = outputs
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    torch.testing.assert_close(
        gradients_of(other, found), gradients_of(model, wanted), rtol=0, atol=0
    )
    torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=0, atol=0)
    other.eval()
    torch.testing.assert_close(run(layers, images), model.eval()(images), rtol=0, atol=0)
