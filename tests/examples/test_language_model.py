"""The language model: its recipes, trained in small, resumed and loaded, and what they refuse."""

import contextlib
import dataclasses
import importlib
import io
import json
import re
import shutil
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from benchmarks.harness.libraries import load
from tests.workers import run_ranks

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ["ddp", "compressed", "gossip", "diloco", "pipeline", "mesh"]
SMALL = "--width 32 --layers 2 --heads 2 --context 32 --lr 0.01 --warm-up 0.2 --interval 3"
SHORT = "--steps 12 --log-every 4 --sample-every 12 --save-every 6"
TEXT = "def f(x):\n    return x\n\n\n" * 400


def run(rank, *arguments):
    """Run the example in this process, in the group of the test; return what it printed."""
    sys.path[:0] = [] if "examples" in sys.path else ["examples"]
    load("transformers")
    with (
        mock.patch.object(sys, "argv", ["language_model.py", *map(str, arguments)]),
        mock.patch.dict("os.environ", RANK=str(rank)),
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
        contextlib.redirect_stdout(io.StringIO()) as shown,
    ):
        importlib.import_module("language_model").main()
    return shown.getvalue()


def run_all(rank, folder):
    torch.set_num_threads(1)
    printed = {}
    for name in RECIPES:
        out = folder / name
        arguments = ["--recipe", name, "--out", out, *SMALL.split(), *SHORT.split()]
        arguments += ["--text", folder / "text"]
        arguments += ["--model", "llama"] if name == "pipeline" else []
        printed[name] = run(rank, *arguments)
        dist.barrier()
        if rank == 0:
            shutil.rmtree(out / "step-0000012")
        dist.barrier()
        printed[name, "resumed"] = run(rank, *arguments, "--resume")
    return printed


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text").write_text(TEXT)
    return folder


@pytest.fixture(scope="module")
def printed(folder):
    first, second = run_ranks(2, run_all, folder)
    assert set(second.values()) == {""}  # only rank 0 prints
    return first


def lines_of(printed):
    """Return the step, loss, speed and bits of each line."""
    rows = re.findall(r"^ +(\d+) +([\d.]+) +([\d,]+) +([\d.]+)$", printed, re.MULTILINE)
    return [(int(step), float(loss), speed, float(bits)) for step, loss, speed, bits in rows]


@pytest.mark.slow  # trains twelve times
def test_every_recipe_learns_and_resumes_to_the_bit(printed, folder, subtests):
    for name in RECIPES:
        with subtests.test(name):
            lines = lines_of(printed[name])
            assert [step for step, *_ in lines] == [1, 4, 8, 12]
            losses = [loss for _, loss, *_ in lines]
            assert losses[0] > 5
            assert losses[-1] < 3.5
            assert [step for step, *_ in lines_of(printed[name, "resumed"])] == [8, 12]
            text = (folder / name / "rank-1.jsonl").read_text()
            logged = [json.loads(line) for line in text.splitlines()]
            steps = [(row["step"], row["loss"]) for row in logged if "step" in row]
            assert steps[-2:] == steps[2:4]  # of steps 8 and 12
            assert sum("ended" in row for row in logged) == 2


@pytest.mark.slow  # trains twelve times
def test_the_bits_sent_are_those_of_each_method(printed):
    bits = {name: lines_of(printed[name])[-1][-1] for name in RECIPES}
    assert bits["ddp"] == 32  # a ring of two ranks sends as much as the gradient
    assert 31 < bits["gossip"] < 33
    assert bits["compressed"] < 16
    assert 15 < bits["diloco"] < 17  # of the last four steps two, 9 and 12, have an all-reduce
    assert bits["pipeline"] > 0


@pytest.mark.slow  # trains twelve times
def test_the_saved_model_is_the_one_that_was_tested(printed, folder, subtests):
    models = load("transformers")
    held_out = TEXT[len(TEXT) * 19 // 20 :].encode()
    for name in RECIPES:
        with subtests.test(name):
            text = printed[name, "resumed"]
            assert "; a sample:\n  | def " in text
            assert text.endswith(f"from_pretrained: {folder / name / 'model'}\n")
            model = models.AutoModelForCausalLM.from_pretrained(folder / name / "model")
            examples = importlib.import_module("examples.data")
            windows = examples.cut_windows(examples.as_tensor([held_out]), 32, 32)
            loss = model(windows, labels=windows).loss.item()
            assert f"held-out loss {loss:.3f}, " in text


def parse(monkeypatch, *arguments):
    """Return the recipe of a command line, and the other options."""
    monkeypatch.syspath_prepend("examples")
    monkeypatch.setattr(sys, "argv", ["language_model.py", *map(str, arguments)])
    return importlib.import_module("recipe").read_options("")


def test_every_file_is_a_recipe_and_flags_win(monkeypatch):
    found = {path.stem for path in (ROOT / "examples/recipes").glob("*.toml")}
    assert found == set(RECIPES)
    for name in RECIPES:
        recipe, options = parse(monkeypatch, "--recipe", name, "--steps", "7")
        assert recipe.method == name
        assert recipe.steps == 7
        assert options.out == Path("runs/language_model", name)
    recipe, _ = parse(monkeypatch, "--recipe", "ddp", "--method", "gossip", "--lr", "0.5")
    assert (recipe.method, recipe.lr) == ("gossip", 0.5)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("widht = 3", r"mine.toml has an unknown key 'widht'; allowed are method, model, width, "),
        ('width = "3"', "width must be of type int, got 3"),
        ("width = 0", "width must be positive, got 0"),
        ("lr = true", "lr must be of type float, got True"),
        ('method = "sgp"', "method must be one of ddp, compressed, gossip, diloco, pipeline, mesh"),
        ("width: 3", "mine.toml must be TOML: "),
        (None, "--recipe must be one of compressed, ddp, .*mine.toml, which does not exist"),
    ],
)
def test_a_wrong_recipe_is_one_sentence(monkeypatch, capsys, tmp_path, text, sentence):
    path = tmp_path / "mine.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit) as ended:
        parse(monkeypatch, "--recipe", path)
    assert ended.value.code == 2
    assert re.search(sentence, capsys.readouterr().err.splitlines()[-1])


def test_a_resume_without_its_checkpoint_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend("examples")
    load("transformers")
    language_model = importlib.import_module("language_model")
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    recipe = importlib.import_module("recipe").Recipe()
    with pytest.raises(SystemExit, match="--resume needs a checkpoint, got none in "):
        language_model.load(None, None, recipe, tmp_path)
    (tmp_path / "step-0000010").mkdir()
    with pytest.raises(SystemExit, match=r"as many ranks as .*, which lacks rank-1-of-4\.pt"):
        language_model.load(None, None, recipe, tmp_path)
    saved = {"recipe": dataclasses.asdict(recipe) | {"steps": 7, "width": 64}}
    torch.save(saved, tmp_path / "step-0000010" / "rank-1-of-4.pt")
    with pytest.raises(SystemExit, match=r"step-0000010, whose width is 64, got 128"):
        language_model.load(None, None, recipe, tmp_path)


def test_a_run_without_resume_keeps_the_earlier_one(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend("examples")
    load("transformers")
    language_model = importlib.import_module("language_model")
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "barrier", lambda: None)
    for number in (1, 2):
        (tmp_path / f"run/step-000000{number}").mkdir(parents=True)
        assert language_model.begin(tmp_path / "run") == 0
        assert not (tmp_path / "run").exists()
        assert (tmp_path / f"run.{number}/step-000000{number}").exists()
    (tmp_path / "run").mkdir()  # without a checkpoint
    assert language_model.begin(tmp_path / "run") == 0
    assert (tmp_path / "run").exists()


def test_a_text_may_have_a_tokenizer(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend("examples")
    transformers = load("transformers")
    tokenizers = importlib.import_module("tokenizers")
    trained = tokenizers.ByteLevelBPETokenizer()
    (tmp_path / "text").write_text(TEXT)
    trained.train([str(tmp_path / "text")], vocab_size=270, show_progress=False)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer)
    fast.save_pretrained(tmp_path / "tokenizer")
    flags = ["--text", tmp_path / "text", "--tokenizer", tmp_path / "tokenizer", "--context", 8]
    recipe, _ = parse(monkeypatch, *flags)
    corpus = importlib.import_module("language_model").Corpus(recipe)
    assert 256 < corpus.vocabulary <= 270
    assert len(corpus.train) < len(TEXT) / 2
    assert corpus.decode(corpus.train[:40]) == TEXT[: len(corpus.decode(corpus.train[:40]))]
