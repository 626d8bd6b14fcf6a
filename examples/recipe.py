"""The recipes of the language model: their keys, and how files and flags set them."""

import argparse
import dataclasses
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ranks import make_parser

FOLDER = Path(__file__).parent / "recipes"
NAMES = sorted(path.stem for path in FOLDER.glob("*.toml"))
CHOICES = {
    "method": ("ddp", "compressed", "gossip", "diloco", "pipeline", "mesh"),
    "model": ("gpt2", "llama"),
}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The keys of a recipe, each a flag too, with the value that holds without it."""

    method: str = "ddp"
    model: str = "gpt2"
    width: int = 128
    layers: int = 4
    heads: int = 4
    text: str = ""  # a file to learn; empty: the source text of Python's library
    tokenizer: str = ""  # what AutoTokenizer.from_pretrained takes; empty: a token is a byte
    context: int = 128  # tokens of a window
    batch: int = 8  # windows a step, of each rank or, of a pipeline, of each replica
    steps: int = 200
    lr: float = 2e-3
    warm_up: float = 0.1  # the part of the updates in which the learning rate rises
    log_every: int = 20  # steps
    sample_every: int = 100
    save_every: int = 100
    compression_rank: int = 4  # of the two narrow matrices that compressed DDP sends for each
    interval: int = 25  # local steps before an outer step
    microbatches: int = 4  # parts of a pipeline's batch
    replicas: int = 2  # of the pipeline, in a mesh

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, (field.type, int)):
                raise ValueError(f"{field.name} must be of type {field.type.__name__}, got {value}")
            if field.type is not str and value <= 0:
                raise ValueError(f"{field.name} must be positive, got {value}")
            if value not in CHOICES.get(field.name, [value]):
                names = ", ".join(CHOICES[field.name])
                raise ValueError(f"{field.name} must be one of {names}, got {value}")


def read_options(description: str) -> tuple[Recipe, argparse.Namespace]:
    """Return the recipe that the command line names, with its flags, and the other options."""
    parser = make_parser(description)
    parser.set_defaults(out=None)
    parser.add_argument(
        "--recipe", default="gossip", help=f"a file, or {', '.join(NAMES)} (default: %(default)s)"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    for field in dataclasses.fields(Recipe):
        shown = f"default: of the recipe, or {field.default!r}"
        flag = f"--{field.name.replace('_', '-')}"
        parser.add_argument(flag, type=field.type, help=shown, default=argparse.SUPPRESS)
    options = parser.parse_args()
    path = FOLDER / f"{options.recipe}.toml"
    path = path if path.exists() else Path(options.recipe)
    try:
        recipe = Recipe(**read(path) | dict(flags(options)))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    options.out = options.out or Path("runs") / Path(sys.argv[0]).stem / path.stem
    return recipe, options


def read(path: Path) -> dict[str, Any]:
    """Return the keys and values of a recipe's file."""
    if not path.exists():
        rule = f"--recipe must be one of {', '.join(NAMES)}, or a file"
        raise ValueError(f"{rule}, got {path}, which does not exist")
    try:
        values = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} must be TOML: {error}") from error
    allowed = [field.name for field in dataclasses.fields(Recipe)]
    for key in values:
        if key not in allowed:
            raise ValueError(f"{path} has an unknown key {key!r}; allowed are {', '.join(allowed)}")
    return values


def flags(options: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """Yield the keys of the recipe that flags have set."""
    for field in dataclasses.fields(Recipe):
        if field.name in options:
            yield field.name, getattr(options, field.name)
