"""The table of wrong invocations: what a person can type and a disk can do, each answered by one line and a status.

Every row runs the real `main` in a folder of its own, and checks four things: the status, that standard error is one
short message that matches, that there is no traceback, and that nothing was left behind. Rows that need a process of
their own (pipes, encodings, a folder that is gone) stand in `test_wrong_surroundings.py`.
"""

import gzip
import io
import json
import os
import re
import shutil
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from dbcl import cli
from dbcl.simulation import Run, RunConfig
from dbcl_audit.findings import Audit, Finding

HUGE = str(10**30)
OWN = """
import sys
import torch
from torch import nn

def net():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

def small():
    x = torch.linspace(-1, 1, 48).view(12, 4)
    return (x[:8], (x[:8, 0] > 0).long()), (x[8:], (x[8:, 0] > 0).long())

def clients():
    train, held_out = small()
    return [train, train], held_out

# models
def needs(width): return net()
def raises(): raise ValueError("no weights\\nhere")
def exits(): sys.exit("bye")
def exits_0(): sys.exit()
def interrupts(): raise EOFError
def asserts(): assert False
def recursive(): return recursive()
def none(): return None
def text(): return "net"
def generator(): yield net()
def one_layer(): return nn.Linear(4, 2)
def no_weights(): return nn.ReLU()
def empty(): return nn.Sequential()
def frozen():
    made = net()
    return made.requires_grad_(False)
def lazy(): return nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.Linear(8, 2))
def nan_weights():
    made = net()
    nn.init.constant_(made[0].weight, float("nan"))
    return made
def narrow(): return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
class Breaks(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = net()
    def forward(self, x):
        raise KeyError("in forward")
def breaks(): return Breaks()
class BreaksInTraining(Breaks):
    def forward(self, x):
        if self.training:
            raise KeyError("only in training")
        return self.body(x)
def breaks_in_training(): return BreaksInTraining()
def gives_none():
    made = Breaks()
    made.forward = lambda x: None
    return made
module = net()
number = 3

# data
def data_one(): return small()[0]
def data_list(): return list(small())
def data_lengths(): return (torch.zeros(8, 4), torch.zeros(7).long()), small()[1]
def data_empty(): return (torch.zeros(0, 4), torch.zeros(0).long()), small()[1]
def data_no_clients(): return [], small()[1]
def data_empty_client(): return [small()[0], (torch.zeros(0, 4), torch.zeros(0).long())], small()[1]
def data_scalars(): return (torch.tensor(1.0), torch.tensor(1)), small()[1]
def data_text(): return "training", "held out"
def data_strings(): return (["a", "b"], ["c", "d"]), small()[1]
def data_dictionary(): return {"train": small()[0]}, small()[1]
def data_floats(): return (small()[0][0], torch.rand(8)), small()[1]
def data_classes(): return (small()[0][0], torch.full((8,), 7)), small()[1]
def data_negative(): return (small()[0][0], torch.full((8,), -1)), small()[1]
def data_late_class(): return (small()[0][0], torch.tensor([0, 1, 0, 1, 0, 1, 0, 9])), small()[1]
def data_held_out_shape(): return small()[0], (torch.zeros(4, 5), torch.zeros(4).long())
def data_held_out_classes(): return small()[0], (torch.zeros(4, 4), torch.full((4,), 9))
def data_ragged(): return [small()[0], (torch.zeros(3, 5), torch.zeros(3).long())], small()[1]
def data_generator():
    yield small()
def data_no_held_out(): return small()[0], None
def data_property(): return (*small(), {"old": [True] * 3})
def data_property_text(): return (*small(), "old")
class Set:
    def __init__(self, item): self.item = item
    def __len__(self): return 8
    def __getitem__(self, row): return self.item(row)
def fails_at(row):
    if row == 5:
        raise OSError(5, "Input/output error", "scan-5.png")
    return torch.zeros(4), 0
def data_unreadable(): return Set(fails_at), small()[1]
def wrong_at(row):
    if row == 5:
        raise ValueError(f"row {row} is broken")
    return torch.zeros(4), 0
def data_broken_row(): return Set(wrong_at), small()[1]
def data_triples(): return Set(lambda row: torch.zeros(4)), small()[1]
def data_keys(): return Set(lambda row: {"x": torch.zeros(4)}), small()[1]

# losses
def loss_nan(outputs, targets): return outputs.sum() * float("nan")
def loss_inf(outputs, targets): return outputs.sum() * float("inf")
def loss_vector(outputs, targets): return outputs[:, 0]
def loss_float(outputs, targets): return 1.0
def loss_none(outputs, targets): return None
def loss_int(outputs, targets): return torch.tensor(3)
def loss_raises(outputs, targets): raise ZeroDivisionError("in the loss")
def loss_one(outputs): return outputs.sum()
def loss_constant(outputs, targets): return torch.tensor(1.0)
def loss_exits(outputs, targets): sys.exit(0)

# metrics
def metric_raises(outputs, targets): raise ZeroDivisionError("in the metric")
def metric_text(outputs, targets): return "good"
def metric_none(outputs, targets): return None
def metric_many(outputs, targets): return outputs
def metric_one(outputs): return 1.0
def metric_exits(outputs, targets): sys.exit(0)
def metric_complex(outputs, targets): return 1j
class Metric:
    def __init__(self, bins): self.bins = bins
class Streaming:
    def reset(self): pass
    def update(self, outputs, targets): raise TypeError("no update today")
    def compute(self): return 1.0
calls = []
def metric_third(outputs, targets):
    calls.append(1)
    if len(calls) == 3:
        raise ZeroDivisionError("in round 3")
    return 0.5

# optimisers and schedules
def optimizer_none(parameters, lr): return None
def optimizer_raises(parameters, lr): raise ValueError("no such lr")
def optimizer_no_lr(parameters): return torch.optim.SGD(parameters, lr=0.1)
def optimizer_text(parameters, lr): return "SGD"
def schedule_raises(round): raise IndexError("no such round")
def schedule_none(round): return None
def schedule_text(round): return "fast"
def schedule_negative(round): return -1.0
def schedule_nan(round): return float("nan")
def schedule_none_taken(): return 1.0
"""
TINY = ("--preset", "blind", "--clients", "2", "--fraction", "1", "--rounds", "1", "--seed", "0", "--quiet")
NET = ("--model", "own:net", "--data", "own:small", *TINY)


@dataclass(frozen=True)
class Row:
    """What is typed, what the answer must match, what lies there before, and what may lie there afterwards."""

    arguments: tuple[str, ...]
    match: str
    prepare: Callable[[], object] | None = None
    status: int = 2
    lines: int = 1
    leaves: str = ""
    """A pattern of the paths that may be new afterwards; nothing else may be."""

    @property
    def name(self) -> str:
        return " ".join(each if len(each) < 40 else f"{each[:30]}..." for each in self.arguments)[:90]


def train(match: str, *arguments: str, **more: object) -> Row:
    return Row(("train", *arguments), match, **more)  # type: ignore[arg-type]


def own(match: str, *arguments: str, **more: object) -> Row:
    """A run that begins, with code of one's own, and fails: it can go on later."""
    more = {"leaves": r"runs(/.*)?", **more}
    return Row(("train", *NET, *arguments), match, **more)  # type: ignore[arg-type]


def never(match: str, *arguments: str, **more: object) -> Row:
    """A run with code of one's own that never begins."""
    return Row(("train", *NET, *arguments), match, **more)  # type: ignore[arg-type]


BRIEF = ("--preset", "blind", "--clients", "2", "--rounds", "1", "--quiet")
COMPANIONS = {
    "alpha": ("--partition", "dirichlet"),
    "update-noise": ("--update-clip", "1"),
    "proximal": ("--algorithm", "fedprox"),
}
"""Options that count only beside another."""

NUMBERS = [
    train(rf"{name.replace('-', '[-_]')}\b", *BRIEF, *COMPANIONS.get(name, ()), f"--{name}", value)
    for name, values in {
        "clients": ("many", "0", "-1", "1.5", HUGE, "", "5000"),
        "fraction": ("half", "0", "-0.5", "1.5", "nan", "inf", ""),
        "alpha": ("nan", "0", "-1", "x", "inf"),
        "epochs": ("0", "-3", "x", "2.5", ""),
        "batch-size": ("0", "-3", "x", "nan"),
        "lr": ("0", "-1", "nan", "inf", "fast", "", "1e400"),
        "lr-decay": ("0", "-1", "nan", "1.5", "x"),
        "momentum": ("1", "-0.1", "nan", "x"),
        "proximal": ("-1", "nan", "x", "inf"),
        "update-clip": ("0", "-1", "nan", "x", "inf"),
        "update-noise": ("-1", "nan", "x", "inf"),
        "veil": ("-1", "nan", "x", "inf", "1e400"),
        "server-lr": ("0", "-1", "nan", "inf", "x", "1e300"),
        "server-momentum": ("1", "-1", "nan", "x"),
        "ema-decay": ("1", "-0.1", "nan", "x"),
        "min-updates": ("0", "-1", "x", "1.5", HUGE, "200"),
        "norm-bound": ("0", "-1", "nan", "x"),
        "rounds": ("0", "-5", "1e3", "x", "", HUGE),
        "target": ("0", "2", "nan", "-1", "x"),
        "patience": ("0", "-1", "x", "1.5"),
        "seed": ("x", "1.5", HUGE, f"-{HUGE}", ""),
        "ratio": ("0", "1", "-2", "nan", "inf", "4-2", "2-", "-", "2-3-4", "x", "", HUGE, "1e400"),
    }.items()
    for value in values
]

CHOICES = [
    train(match, *BRIEF, f"--{name}", value)
    for name, match, values in (
        ("partition", "partition must be one of", ("", "even", "IID")),
        ("algorithm", "algorithm must be one of", ("sgdd", "")),
        ("metric-mode", "metric_mode must be one of", ("worse", "")),
        ("sketch", "sketch must be one of", ("count", "", "count-v2")),
        ("server-optimizer", "server_optimizer must be one of", ("sgd", "")),
        ("wire", "wire must be one of", ("int8", "")),
        ("engine", "engine must be one of", ("gpu", "")),
        ("precision", "precision must be one of", ("fp8", "")),
        ("device", "device must be auto, cpu, cuda", ("gpu", "", "cuda:", "cuda:-1", "cpu:0", "meta", "mps")),
        ("device", "finds no CUDA device", ("cuda", "cuda:99")),
        ("device", "device must be auto", (f"cuda:{HUGE}",)),
        ("data", "data must be one of digits", ("", "digit", "\u65e5\u672c", "../data", "digits,mnist")),
        ("data", "is missing; .*--data-dir", ("mnist", "cifar10", "lfw")),
        ("model", "no model", ("", "resnet", "r\u00e9seau", "mnist_mlp", ".", "\x1b[31mred")),
        ("loss", "loss must be cross-entropy or", ("", "mse", "cross_entropy")),
        ("metric", "metric must be loss or", ("", "accuracy", "r2")),
        ("optimizer", "optimizer must be one of", ("", "Adamm", "Optimizer")),
        ("optimizer", "the optimiser .* cannot train this model", ("LBFGS", "SparseAdam", "Muon", "torch.optim:LBFGS")),
        ("lr-schedule", "lr_schedule must be constant, cosine or", ("", "linear")),
        ("coverage", "matches no parameter", ("", "nothing", "!", "*.weights", "hidden,", "\u00fc")),
        ("coverage", "nothing to cover", ("!*",)),
        ("transcripts", "no such party", ("", "9", "-1", "everybody", "0,9", "server,", "\u0663", HUGE)),
        ("track", "no tracker", ("", "stdout", "tensorboards", ",")),
        ("track", "no tracker", ("mlflow", "wandb:p")),
        ("preset", "no preset", ("", "blinded", ".", "/", "nowhere.toml", "a" * 300, "presets/blind")),
    )
    for value in values
]

TYPOS = [
    Row(arguments, match)
    for arguments, match in (
        (("trian",), "Did you mean 'train'"),
        (("nothing",), "No such command 'nothing'"),
        (("",), "No such command"),
        (("--verbose",), "No such option"),
        (("--versoin",), "--version"),
        (("train", "--clents", "3"), "Did you mean one of: .*'--clients'"),
        (("train", "--ruonds", "3"), "--rounds"),
        (("train", "--qiuet"), "--quiet"),
        (("train", "--batch_size", "3"), "--batch-size"),
        (("train", "--no-quiet"), "No such option"),
        (("train", "-r", "3"), "No such option"),
        (("train", "--rounds"), "--rounds.*requires an argument"),
        (("train", "--json=yes"), "--json.*does not take a value"),
        (("train", "digits"), "unexpected extra argument"),
        (("train", "--", "--rounds", "3"), "unexpected extra argument"),
        (("plan",), "Missing argument 'MODEL'"),
        (("plan", "mnist-mlp", "more"), "unexpected extra argument"),
        (("plan", "mnist-mlp", "--raito", "3"), "--ratio"),
        (("plan", "mnist-mlp", "--rounds", "3"), "No such option"),
        (("audit",), "Missing argument 'RUN'"),
        (("audit", "runs/1", "runs/2"), "unexpected extra argument"),
        (("audit", "runs/1", "--qiuck"), "--quick"),
        (("compare",), "Missing argument 'RUNS"),
        (("compare", "--uot", "a.html", "b"), "--out"),
        (("env", "more"), "unexpected extra argument"),
        (("env", "--jsno"), "--json"),
        (("data", "fecth"), "Did you mean 'fetch'"),
        (("data", "mnist"), "No such command 'mnist'"),
        (("data", "fetch"), "Missing argument 'NAME'"),
        (("data", "fetch", "mnist", "cifar10"), "unexpected extra argument"),
        (("data", "--data-dri", "x"), "--data-dir"),
    )
]


def file(name: str, content: bytes | str = b"") -> Callable[[], object]:
    """A file of this content, in folders that are made."""

    def make() -> None:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(content.encode() if isinstance(content, str) else content)

    return make


def folder(name: str) -> Callable[[], object]:
    return lambda: Path(name).mkdir(parents=True)


def link(name: str, to: str) -> Callable[[], object]:
    return lambda: Path(name).symlink_to(to)


PRESETS = [
    train(match, "--quiet", "--preset", "mine.toml", prepare=file("mine.toml", content))
    for content, match in (
        (b"\xff\xfe\x00binary", "mine.toml.*text"),
        (b"\x00" * 100, "mine.toml.*TOML"),
        ("rounds = ", "mine.toml.*not a TOML file"),
        ("rounds 3", "mine.toml.*not a TOML file"),
        ("rounds = 1\nrounds = 2", "mine.toml.*not a TOML file"),
        ('rounds = "3"', "mine.toml.*rounds must be a whole number, got '3'"),
        ("rounds = 1.5", "rounds must be a whole number, got 1.5"),
        ("rounds = true", "rounds must be a whole number, got True"),
        ("rounds = [3]", "rounds must be a whole number"),
        ("rounds = 1979-05-27", "rounds must be a whole number"),
        ("lr = nan", "lr must be"),
        ("lr = inf", "lr must be"),
        ("rounds = 0", "rounds must be 1 or more"),
        ("ratio = [1.0, 2.0, 3.0]", "ratio must be a number or a list of 2 numbers"),
        ("ratio = []", "ratio must be"),
        ('ratio = "wide"', "ratio is a number or a range"),
        ("coverage = [1, 2]", "coverage must be"),
        ("coverage = []", "the model has nothing to cover"),
        ("transcripts = [0]", "transcripts must be a list of texts"),
        ("device = 0", "device must be text, got 0"),
        (f"seed = {HUGE}", "seed must be"),
        ('seed = "0"', "seed must be a whole number, got '0'"),
        ("seed = 1.5", "seed must be a whole number"),
        ("seed = 0\nfixed_secrets = true", "mine.toml: unknown settings: fixed_secrets"),
        ("fixed_secrets = true", "unknown settings: fixed_secrets"),
        ("ruonds = 3", "unknown setting.* ruonds.*did you mean rounds"),
        ("[train]\nrounds = 3", "unknown setting.* train"),
        ("a = 1\nb = 2", "unknown settings.* a, b"),
        ("update_noise = 1.0", "update_noise is relative to update_clip"),
        ('optimizer = "Adam"\nmomentum = 0.9', "momentum is that of SGD"),
        ("quiet = true", "unknown setting.* quiet"),
    )
] + [
    train("no preset 'mine'.*Is a directory", "--preset", "mine", prepare=folder("mine")),
    train("no preset .*Not a directory", "--preset", "file/mine.toml", prepare=file("file")),
    train("no preset .*symbolic links", "--preset", "loop", prepare=link("loop", "loop")),
    train("no preset", "--preset", "gone.toml", prepare=link("gone.toml", "nowhere")),
    Row(("plan", "mnist-mlp", "--preset", "mine.toml"), "mine.toml.*not a TOML", file("mine.toml", "=")),
    Row(("plan", "mnist-mlp", "--preset", "nowhere"), "no preset"),
]

TOGETHER = [
    train(match, *BRIEF, *arguments)
    for match, *arguments in (
        ("update_noise is relative to update_clip", "--update-noise", "1"),
        ("momentum is that of SGD", "--optimizer", "Adam", "--momentum", "0.9"),
        ("target is an accuracy between 0 and 1", "--target", "97"),
        ("cannot be divided", "--clients", "5000"),
        ("cannot be divided", "--partition", "shards", "--clients", "2001"),
    )
] + [
    train("only .* may change, not lr", "--resume", "nowhere", "--lr", "0.1"),
    train("only .* may change, not clients, seed", "--resume", "nowhere", "--seed", "0", "--clients", "3"),
    train("nowhere holds no run", "--resume", "nowhere", "--rounds", "3"),
    train("--out is for a new run", "--resume", "nowhere", "--out", "elsewhere"),
    train("--preset is for a new run", "--resume", "nowhere", "--preset", "paper"),
    train("holds no run", "--resume", ""),
    train("holds no run", "--resume", "\u65e5\u672c"),
    train("config.toml cannot be read: File name too long", "--resume", "a" * 300),
]

PLAN = [
    Row(("plan", *arguments), match)
    for match, *arguments in (
        ("no model", ""),
        ("no model", "resnet"),
        ("cannot import", "nowhere:net"),
        ("cannot import", ":"),
        ("cannot import", "torch.nn:"),
        ("cannot import", "torch.nn:Nothing"),
        ("needs arguments", "torch.nn:Linear"),
        ("the model has nothing to train", "torch.nn:ReLU"),
        ("function or a class", "math:pi"),
        ("must make a torch.nn.Module", "builtins:dict"),
        ("SystemExit", "builtins:exit"),
        ("'builtins:input' failed", "builtins:input"),
        *[
            ("shape is channels,height,width", "mnist-mlp", "--shape", shape)
            for shape in ("", "28", "1,28", "1,28,28,1", "a,b,c", "1.5,28,28", "1;28;28", "0,28,28", "-1,28,28")
        ],
        ("mnist-mlp cannot be made for examples of shape", "mnist-mlp", "--shape", f"1,{HUGE},28"),
        ("mnist-mlp cannot be made for examples of shape", "mnist-mlp", "--shape", "1,100000,10000000"),
        ("cannot take examples", "mnist-cnn", "--shape", "1,4,4"),
        ("outputs must be 1 or more", "mnist-mlp", "--outputs", "0"),
        ("outputs must be 1 or more", "mnist-mlp", "--outputs", "-3"),
        ("outputs", "mnist-mlp", "--outputs", "ten"),
        ("mnist-mlp cannot be made for .* outputs", "mnist-mlp", "--outputs", HUGE),
        ("mnist-mlp cannot be made for .* outputs", "mnist-mlp", "--outputs", str(10**13)),
        ("ratio", "mnist-mlp", "--ratio", "0"),
        ("ratio", "mnist-mlp", "--ratio", "nan"),
        ("ratio", "mnist-mlp", "--ratio", HUGE),
        ("veil", "mnist-mlp", "--veil", "nan"),
        ("veil", "mnist-mlp", "--veil", "-1"),
        ("wire must be one of", "mnist-mlp", "--wire", "int8"),
        ("sketch must be one of", "mnist-mlp", "--sketch", "none"),
        ("matches no parameter", "mnist-mlp", "--coverage", "conv*"),
        ("lanes must be 1 or more, got 0", "mnist-mlp", "--lanes", "0"),
        ("lanes must be between 1 and 1024, got 1025", "mnist-mlp", "--lanes", "1025"),
        ("'two' is not a valid integer", "mnist-mlp", "--lanes", "two"),
        ("sampling-v1 has one, got 2", "mnist-mlp", "--lanes", "2", "--sketch", "sampling-v1"),
        ("sketch must be one of count-v1", "mnist-mlp", "--sketch", "lanes-v1"),
    )
]

MODELS = (
    [
        Row(("plan", f"own:{name}"), match)
        for name, match in (
            ("needs", r"'own:needs' needs arguments \(width\)"),
            ("raises", r"'own:raises' failed: ValueError: no weights here \(.*own.py, line 19\)"),
            ("exits", "'own:exits' failed: SystemExit: bye"),
            ("exits_0", "'own:exits_0' failed: SystemExit"),
            ("interrupts", "'own:interrupts' failed: EOFError"),
            ("asserts", "'own:asserts' failed: AssertionError"),
            ("recursive", "'own:recursive' failed: RecursionError"),
            ("none", "made a NoneType"),
            ("text", "made a str"),
            ("generator", "made a generator"),
            ("module", "'own:module' is a network, and must be a function that makes one"),
            ("number", "is a int"),
            ("missing", "no attribute 'missing'"),
            ("net.missing", "no attribute 'missing'"),
            ("net()", "no attribute"),
            ("no_weights", "the model has nothing to train"),
            ("empty", "the model has nothing to train"),
            ("frozen", "the model has nothing to train"),
        )
    ]
    + [
        Row(("plan", "own:one_layer", *arguments), f"{match}weight is the output layer and nothing else can be covered")
        for match, *arguments in (
            ("", "--coverage", "hidden"),
            ("lanes=2 needs a sketch: ", "--lanes", "2"),
        )
    ]
    + [Row(("plan", "own:net", "--lanes", "2"), "0.weight has 4 inputs.*coverage='hidden'")]
    + [
        Row(("plan", name), match, prepare)
        for name, match, prepare in (
            (
                "broken:net",
                "cannot import the model 'broken:net': SyntaxError: invalid syntax .*line 1",
                file("broken.py", "def net(:\n"),
            ),
            ("broken:net", "SyntaxError: source code string cannot contain null bytes", file("broken.py", b"\x00\xff")),
            ("broken:net", "NameError: name 'tirch'", file("broken.py", "import os\ntirch.zeros(3)\n")),
            ("broken:net", "No module named 'nowhere_at_all'", file("broken.py", "import nowhere_at_all\n")),
            ("broken:net", "SystemExit", file("broken.py", "import sys; sys.exit(0)\n")),
            ("folder:net", "no attribute 'net'", folder("folder")),
            ("own.py:net", "cannot import", None),
            ("./own:net", "cannot import", None),
            ("/etc/own:net", "cannot import", None),
            (".own:net", "cannot import", None),
            ("own:net:net", "no attribute 'net:net'", None),
            ("o\u00fcn:net", "cannot import", None),
        )
    ]
)

LISTS = [
    Row(("plan", "own:lazy"), "0.weight: has no shape yet", lines=3),
    train("2 problems with this plan", *BRIEF, "--coverage", ",", lines=3),
]

NEVER = [
    never(match, f"--{option}", f"own:{name}")
    for option, name, match in (
        ("model", "raises", "'own:raises' failed: ValueError"),
        ("model", "exits", "SystemExit: bye"),
        ("model", "narrow", "do not go together"),
        ("model", "breaks", "do not go together.*in forward"),
        ("model", "gives_none", "do not go together"),
        ("model", "nan_weights", "the network's initial weights are not all finite: 0.weight"),
        ("data", "missing", "cannot import the data"),
        ("data", "raises", "'own:raises' failed: ValueError: no weights here"),
        ("data", "needs", "needs arguments"),
        ("data", "exits", "SystemExit"),
        ("data", "none", "it gave a NoneType"),
        ("data", "data_one", "must be a pair"),
        ("data", "data_list", "it gave a list"),
        ("data", "data_lengths", r"a row for each example, got the shapes \(8, 4\), \(7,\)"),
        ("data", "data_empty", "empty"),
        ("data", "data_no_clients", "the list of clients is empty"),
        ("data", "data_empty_client", "client 1: a set of examples is empty"),
        ("data", "data_scalars", "a set of examples is empty"),
        ("data", "data_text", "examples are a pair"),
        ("data", "data_strings", "tensors"),
        ("data", "data_dictionary", "examples are a pair"),
        ("data", "data_floats", "no classes: give the loss"),
        ("data", "data_classes", "the training examples hold the class 7"),
        ("data", "data_negative", "the training examples hold the class -1"),
        ("data", "data_late_class", "class 9.*2 outputs"),
        ("data", "data_held_out_shape", "held-out.*do not go together"),
        ("data", "data_held_out_classes", "held-out.*class 9.*2 outputs"),
        ("data", "data_ragged", "differ in shape"),
        ("data", "data_generator", "it gave a generator"),
        ("data", "data_no_held_out", "the held-out examples: .*NoneType"),
        ("data", "data_property", "property 'old' must be True or False"),
        ("data", "data_property_text", "dictionary"),
        ("data", "data_triples", "pair"),
        ("data", "data_keys", "dictionary needs its target"),
        ("loss", "missing", "cannot import the loss"),
        ("loss", "number", "is a int"),
        ("loss", "loss_vector", "one number for a batch"),
        ("loss", "loss_float", "one number for a batch.*float"),
        ("loss", "loss_none", "one number for a batch.*NoneType"),
        ("loss", "loss_int", "one number for a batch"),
        ("loss", "loss_raises", "do not go together.*in the loss"),
        ("loss", "loss_one", "do not go together.*positional argument"),
        ("loss", "loss_exits", "SystemExit"),
        ("loss", "Metric", "'own:Metric' is a class that needs arguments .bins."),
        ("metric", "missing", "cannot import the metric"),
        ("metric", "Metric", "'own:Metric' is a class that needs arguments .bins."),
        ("metric", "number", "is a int"),
        ("optimizer", "missing", "cannot import the optimiser"),
        ("optimizer", "number", "is a int"),
        ("lr-schedule", "missing", "cannot import the schedule"),
        ("optimizer", "optimizer_none", "optimizer_none made a NoneType"),
        ("optimizer", "optimizer_raises", "own:optimizer_raises.*ValueError: no such lr"),
        ("optimizer", "optimizer_no_lr", "own:optimizer_no_lr.*lr"),
        ("optimizer", "optimizer_text", "optimizer_text made a str"),
        ("lr-schedule", "schedule_raises", "own:schedule_raises.*IndexError: no such round"),
        ("lr-schedule", "schedule_none", "'own:schedule_none' must give one number, and gave None"),
        ("lr-schedule", "schedule_text", "'own:schedule_text' must give one number, and gave 'fast'"),
        ("lr-schedule", "schedule_negative", "the schedule gives round 0 the learning rate -"),
        ("lr-schedule", "schedule_nan", "the schedule gives round 0 the learning rate nan"),
        ("lr-schedule", "schedule_none_taken", "own:schedule_none_taken.*positional argument"),
    )
] + [
    train("mnist-mlp is made for the built-in", *TINY, "--data", "own:small"),
    train("the held-out examples: .* do not go together", *TINY, "--model", "own:net"),
    never("8 examples cannot be divided into 18 parts", "--partition", "shards", "--clients", "9"),
]

FAILING = [
    own(match, f"--{option}", f"own:{name}")
    for option, name, match in (
        ("data", "data_unreadable", "scan-5.png"),
        ("data", "data_broken_row", r"own:Set.__getitem__ failed: ValueError: row 5 is broken \(.*own.py, line \d+\)"),
        ("model", "breaks_in_training", "own:BreaksInTraining.forward failed: KeyError: 'only in training'"),
        ("loss", "loss_constant", "own:loss_constant.*grad"),
        ("metric", "metric_raises", r"own:metric_raises.*ZeroDivisionError: in the metric \(.*own.py, line \d+\)"),
        ("metric", "metric_text", "own:metric_text.*one number.*'good'"),
        ("metric", "metric_none", "own:metric_none.*one number.*None"),
        ("metric", "metric_many", r"own:metric_many.*one number.*shape \(4, 2\)"),
        ("metric", "metric_one", "own:metric_one.*positional argument"),
        ("metric", "metric_exits", "own:metric_exits.*SystemExit"),
        ("metric", "metric_complex", "own:metric_complex.*one number"),
        ("metric", "Streaming", "own:Streaming.*no update today"),
    )
] + [
    own("diverged in round 1", "--loss", "own:loss_nan", lines=6),
    own("diverged in round 1", "--loss", "own:loss_inf", lines=6),
    own("diverged in round", "--lr", "1e30", "--rounds", "9", lines=6),
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one round with transcripts, which the rows copy as `run` and damage."""
    place = tmp_path_factory.mktemp("wrong") / "run"
    list(Run.start(RunConfig(rounds=1, clients=2, seed=0, transcripts=("0", "server")), place).play())
    return place


def damaged(path: str, content: bytes | str | None) -> Callable[[], object]:
    """A file of the finished run with this content, or without it."""

    def damage() -> None:
        if content is not None:
            file(f"run/{path}", content)()
            return
        target = Path("run", path)
        shutil.rmtree(target) if target.is_dir() else target.unlink()

    return damage


def with_setting(line: str) -> Callable[[], object]:
    """The settings of the finished run with a line of them replaced."""

    def damage() -> None:
        name, path = line.partition(" ")[0], Path("run/config.toml")
        kept = [each for each in path.read_text().splitlines() if each.partition(" ")[0] != name]
        path.write_text("\n".join([*kept, line]))

    return damage


def own_run() -> None:
    for line in ('model = "own:breaks_in_training"', 'data = "own:small"'):
        with_setting(line)()


def damaged_checkpoints(content: bytes) -> Callable[[], object]:
    def damage() -> None:
        for path in Path("run/checkpoints").iterdir():
            path.write_bytes(content)

    return damage


def only_config() -> None:
    shutil.rmtree("run")
    file("run/config.toml", "rounds = 3")()


def cut_checkpoints() -> None:
    for path in Path("run/checkpoints").iterdir():
        path.write_bytes(path.read_bytes()[:-100])


def held() -> Callable[[], object]:
    """Another process works in the folder."""

    def hold() -> None:
        import fcntl

        handle = os.open("run/.lock", os.O_RDWR)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held_open.append(handle)

    return hold


held_open: list[int] = []
MORE = ("train", "--quiet", "--resume", "run", "--rounds", "2")

RESUME = [
    Row(MORE, match, prepare)
    for match, prepare in (
        ("run holds no run: it has no config.toml", damaged("config.toml", None)),
        ("config.toml: not a TOML file", damaged("config.toml", "rounds = ")),
        ("config.toml: not a TOML file", damaged("config.toml", b"\x00" * 9)),
        ("config.toml: no text", damaged("config.toml", b"\xff\xfe")),
        ("config.toml: unknown settings: rouns; did you mean rounds", damaged("config.toml", "rouns = 3")),
        ("config.toml: rounds must be a whole number", damaged("config.toml", 'rounds = "3"')),
        ("config.toml: unknown settings: fixed_secrets", with_setting("fixed_secrets = true")),
        ("no whole checkpoint", damaged("checkpoints", None)),
        ("no whole checkpoint", damaged_checkpoints(b"")),
        ("no whole checkpoint", damaged_checkpoints(b"half a file")),
        ("no whole checkpoint", cut_checkpoints),
        ("No such file or directory: run/metrics.jsonl", damaged("metrics.jsonl", None)),
        ("in use by", held()),
        ("ema_decay", with_setting("ema_decay = 0.0")),
        ("is missing", with_setting('data = "mnist"')),
        ("name code that would be run .model own:net.*--allow-code", with_setting('model = "own:net"')),
        ("optimi[sz]er", with_setting('server_optimizer = "adam"')),
    )
] + [
    Row(("train", "--quiet", "--resume", "run", *arguments), match, prepare)
    for match, prepare, *arguments in (
        ("rounds must be 1 or more", None, "--rounds", "0"),
        ("only .* may change, not lr", None, "--lr", "0.1"),
        ("patience must be", None, "--patience", "0"),
        ("target is an accuracy", None, "--target", "7"),
        ("no tracker", None, "--track", "nowhere"),
        ("has another model; with --resume it cannot change", None, "--model", "own:net"),
        ("--out is for a new run", None, "--out", "elsewhere"),
        ("--preset is for a new run", None, "--preset", "paper"),
        ("plain is a file", file("plain", "text"), "--resume", "plain"),
        ("config.toml cannot be read: Is a directory", folder("odd/config.toml"), "--resume", "odd"),
        ("run/config.toml is a file, and the run is its folder", None, "--resume", "run/config.toml"),
        ("holds no run", None, "--resume", "run/checkpoints"),
    )
]

RESUME += [
    Row(MORE, "no whole checkpoint", only_config, leaves=r"run/\.lock"),
    Row(
        MORE,
        "the checkpoint belongs to another model",
        with_setting('model = "mnist-cnn"'),
        lines=7,  # the first five differences
    ),
    *(
        Row(
            ("train", "--quiet", "--resume", "run"),
            "metrics.jsonl is whole for 0 of 1 rounds, and no round is left to play: raise --rounds",
            damaged("metrics.jsonl", content),
        )
        for content in ("", b"\xff\xfe\x00", "[1, 2]\n", "3\n", '{"round": "one"}\n', "[" * 100000, "null\n")
    ),
    Row(
        ("train", "--quiet", "--resume", "run"),
        "metrics.jsonl is whole for 0 of 1 rounds",
        lambda: Path("run/metrics.jsonl").write_text(Path("run/metrics.jsonl").read_text().replace("0.", '"0."')),
    ),
]

OUT = [
    train(match, *BRIEF, "--out", place, prepare=prepare)
    for match, place, prepare in (
        ("holds a run already; go on with it by --resume", "run", None),
        ("exists and is not empty", "full", file("full/notes.txt", "mine")),
        ("exists and is not empty", "notes.txt", file("notes.txt", "mine")),
        ("Not a directory: notes.txt/run", "notes.txt/run", file("notes.txt", "mine")),
        ("Not a directory: notes.txt/more", "notes.txt/more/run", file("notes.txt", "mine")),
        ("File name too long", "a" * 300, None),
        ("File name too long", "new/" + "a" * 300, None),
        ("Too many levels of symbolic links: loop", "loop", link("loop", "loop")),
        ("No such file or directory: gone/run", "gone/run", link("gone", "nowhere")),
        ("/dev/null exists and is not empty", "/dev/null", None),
        ("Not a directory", "/dev/null/run", None),
        ("exists and is not empty", ".", None),
    )
] + [
    train("TensorBoard cannot write into plain", *BRIEF, "--track", "tensorboard:plain", prepare=file("plain")),
    train(
        "TensorBoard cannot write into plain/logs", *BRIEF, "--track", "tensorboard:plain/logs", prepare=file("plain")
    ),
    train("Not a directory: runs/001-blind-digits", *BRIEF, prepare=file("runs", "a file")),
    train("is missing", *BRIEF, "--data", "mnist", "--data-dir", "plain", prepare=file("plain")),
    train(
        "MNIST.*damaged",
        *BRIEF,
        "--data",
        "mnist",
        "--data-dir",
        "d",
        prepare=file("d/MNIST/raw/train-images-idx3-ubyte.gz", "no gzip"),
    ),
    train(
        "no idx file",
        *BRIEF,
        "--data",
        "mnist",
        "--data-dir",
        "d",
        prepare=file("d/MNIST/raw/train-images-idx3-ubyte", b"\x00\x00\x08\x03"),
    ),
    train(
        "no whole number of records",
        *BRIEF,
        "--data",
        "cifar10",
        "--data-dir",
        "d",
        prepare=file("d/cifar-10-batches-bin/data_batch_1.bin", "x"),
    ),
    train("lfw.npz layout", *BRIEF, "--data", "lfw", "--data-dir", "d", prepare=file("d/lfw/lfw.npz", b"PK\x03\x04")),
    train("lfw.npz layout", *BRIEF, "--data", "lfw", "--data-dir", "d", prepare=folder("d/lfw/lfw.npz")),
]

FOUND = Audit("one", {}, {"accuracy": 0.9}, (), (Finding("a", "client", "naive", "update", "cosine", 0.5),), 1.0).json()


def archive(**arrays: object) -> bytes:
    stream = io.BytesIO()
    np.savez_compressed(stream, **{name: np.asarray(values) for name, values in arrays.items()})
    return stream.getvalue()


def changed(**values: object) -> str:
    return json.dumps({**json.loads(FOUND), **values})


AUDIT = [
    Row(("audit", *arguments), match, prepare)
    for match, prepare, *arguments in (
        ("nowhere holds no run", None, "nowhere"),
        ("holds no run", None, ""),
        ("config.toml cannot be read: File name too long", None, "a" * 300),
        ("run/config.toml is a file, and the run is its folder", None, "run/config.toml"),
        ("config.toml: not a TOML", damaged("config.toml", "="), "run"),
        ("config.toml: unknown settings", damaged("config.toml", "veils = 1"), "run"),
        ("name code that would be run", with_setting('model = "own:net"'), "run"),
        ("cannot import the model", with_setting('model = "nowhere:net"'), "run", "--allow-code"),
        ("own:raises. failed: ValueError", with_setting('model = "own:raises"'), "run", "--allow-code"),
        ("mnist-mlp is made for the built-in datasets", with_setting('data = "own:small"'), "run", "--allow-code"),
        ("name code that would be run", own_run, "run", "--quick"),
        ("was given in Python", with_setting('model = "Net (in Python)"'), "run"),
        ("MNIST.* is missing", with_setting('data = "mnist"'), "run"),
        ("parties must be 2 or more", None, "run", "--parties", "1"),
        ("parties must be 2 or more", None, "run", "--parties", "-3"),
        ("--parties", None, "run", "--parties", "two"),
        ("parties", None, "run", "--parties", HUGE),
        ("--seed", None, "run", "--seed", "x"),
        ("seed must be 0 or more", None, "run", "--seed", "-1"),
        ("seed must be", None, "run", "--seed", HUGE),
        ("a limit is written measure=number", None, "run", "--fail-above", "psnr"),
        ("a limit is written measure=number", None, "run", "--fail-above", ""),
        ("unknown measure 'speed'", None, "run", "--fail-above", "speed=3"),
        ("unknown adversary 'owner'", None, "run", "--fail-above", "owner.psnr=3"),
        ("the limit of psnr must be a number", None, "run", "--fail-above", "psnr=high"),
        ("the limit of psnr must be finite", None, "run", "--fail-above", "psnr=nan"),
        ("psnr has two limits", None, "run", "--fail-above", "psnr=1,psnr=2"),
        ("cannot be limited", None, "run", "--fail-above", "error=1"),
        ("--out is a folder, and must be a file: run", None, "run", "--quick", "--out", "run"),
        ("--out cannot be plain/page.html: plain is a file", file("plain"), "run", "--out", "plain/page.html"),
        ("--out is the page.*; the JSON is written beside it", None, "run", "--out", "page.json"),
        ("--out cannot be /proc/page.html: .*, in /proc", None, "run", "--out", "/proc/page.html"),
        ("epsilon is for a run with a guarantee, and run promises nothing", None, "run", "--fail-above", "epsilon=8"),
        ("epsilon is for a run with a guarantee", None, "run", "--fail-above", "psnr=3,client.epsilon=8"),
    )
] + [
    Row(
        ("audit", "run", "--quick", "--allow-code"),
        "incomplete: .* failed: own:BreaksInTraining.forward failed: KeyError",
        own_run,
        status=1,
        lines=4,
        leaves=r"run/audit\.(html|json)",
    )
]

DAMAGED = [
    Row(("train", *BRIEF, "--data", name, "--data-dir", "d"), match, file(f"d/{path}", content))
    for name, path, content, match in (
        ("mnist", "MNIST/raw/train-images-idx3-ubyte.gz", gzip.compress(b"x" * 99)[:-4], "ubyte.gz: damaged"),
        ("mnist", "MNIST/raw/train-images-idx3-ubyte.gz", gzip.compress(b"x")[:10] + b"\xff" * 20, "ubyte.gz: damaged"),
        ("mnist", "MNIST/raw/train-images-idx3-ubyte.gz", gzip.compress(b"x"), "is no idx file"),
        ("lfw", "lfw/lfw.npz", b"", "lfw.npz layout"),
        ("lfw", "lfw/lfw.npz", archive(black=3), "lfw.npz layout"),
        ("lfw", "lfw/lfw.npz", archive(black=[0, 1], images=[1], gender=[0, 1]), "lfw.npz layout"),
        ("lfw", "lfw/lfw.npz", archive(black=[-1], images=np.zeros((1, 2, 2, 3)), gender=[0]), "not one example"),
        ("lfw", "lfw/lfw.npz", archive(black=[0, 1])[:-40], "lfw.npz layout"),
    )
]

COMPARE = [
    Row(("compare", *arguments), match, prepare)
    for match, prepare, *arguments in (
        ("nowhere/audit.json is missing: run `dbcl audit nowhere` first", None, "nowhere"),
        ("run/audit.json is missing", None, "run"),
        ("audit.json is missing", None, ""),
        ("no audit", file("a.json", ""), "a.json"),
        ("no audit", file("a.json", "{"), "a.json"),
        ("no audit", file("a.json", "[]"), "a.json"),
        ("no audit", file("a.json", "3"), "a.json"),
        ("no audit", file("a.json", "null"), "a.json"),
        ("no audit", file("a.json", "{}"), "a.json"),
        ("no audit", file("a.json", b"\xff\xfe\x00"), "a.json"),
        ("no audit", file("a.json", '{"findings": 3, "adversaries": []}'), "a.json"),
        ("no audit", file("a.json", changed(more=1)), "a.json"),
        ("no audit", file("a.json", changed(findings=["x"])), "a.json"),
        ("no audit", file("a.json", changed(findings=[{}])), "a.json"),
        ("no audit", file("a.json", changed(run=3)), "a.json"),
        ("no audit", file("a.json", changed(run={"accuracy": "good"})), "a.json"),
        ("no audit", file("a.json", changed(run={"accuracy": 1, "bytes": []})), "a.json"),
        ("no audit", file("a.json", changed(name=3)), "a.json"),
        ("no audit", file("a.json", changed(settings=[])), "a.json"),
        ("no audit", file("a.json", changed(adversaries=[1])), "a.json"),
        ("no audit", file("a.json", FOUND.replace("0.5", '"half"')), "a.json"),
        ("no audit", file("a.json", "[" * 100000), "a.json"),
        ("Is a directory: a.json", folder("a.json"), "a.json"),
        ("--out is a folder, and must be a file", file("a.json", FOUND), "a.json", "--out", "."),
        ("--out cannot be .*: a.json is a file", file("a.json", FOUND), "a.json", "--out", "a.json/b.html"),
        ("File name too long", file("a.json", FOUND), "a.json", "--out", "a" * 300),
    )
]


def answers(what: object) -> Callable[[pytest.MonkeyPatch], None]:
    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        def opened(*_: object, **__: object) -> object:
            if isinstance(what, BaseException):
                raise what
            return what

        monkeypatch.setattr(urllib.request, "urlopen", opened)

    return patch


DATA = [
    Row(("data", *arguments), match, prepare)
    for match, prepare, *arguments in (
        ("nothing to fetch", None, "fetch", "digits"),
        ("LFW cannot be fetched", None, "fetch", "lfw"),
        ("no dataset 'mnits'; choose mnist, cifar10", None, "fetch", "mnits"),
        ("no dataset ''", None, "fetch", ""),
        ("cannot download .*by hand", None, "fetch", "mnist", "--data-dir", "d"),
        ("cannot download .*by hand", None, "fetch", "cifar10", "--data-dir", "d"),
        ("cannot download .*by hand", None, "--data-dir", "d", "fetch", "cifar10"),
    )
]

ROWS = [
    *(*NUMBERS, *CHOICES, *TYPOS, *PRESETS, *TOGETHER, *PLAN, *MODELS, *LISTS, *NEVER, *FAILING),
    *(*RESUME, *OUT, *AUDIT, *COMPARE, *DATA, *DAMAGED),
]


@pytest.fixture(autouse=True)
def around(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module of one's own, no network, no datasets, and nothing of it left afterwards."""
    Path("own.py").write_text(OWN)
    monkeypatch.setenv("DBCL_DATA", "no-data")
    answers(urllib.error.URLError("no network in tests"))(monkeypatch)
    yield
    for name in ("own", "broken", "folder"):
        sys.modules.pop(name, None)
    while held_open:
        os.close(held_open.pop())


def everything() -> set[str]:
    return {str(path) for path in Path(".").rglob("*") if "__pycache__" not in path.parts}


def invoked(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["dbcl", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def wants_run(row: Row) -> bool:
    return any(each == "run" or each.startswith("run/") for each in row.arguments)


@pytest.mark.parametrize("row", [pytest.param(row, id=f"{at}: {row.name}") for at, row in enumerate(ROWS)])
def test_one_message(
    row: Row, finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if wants_run(row):
        shutil.copytree(finished, "run")
    if row.prepare is not None:
        row.prepare()
    before = everything()
    status = invoked(monkeypatch, *row.arguments)
    said = capsys.readouterr().err
    assert re.search(row.match, said), said
    assert status == row.status
    assert len(said.strip().splitlines()) <= row.lines, said
    assert len(said) < 800 * row.lines
    left = {path for path in everything() - before if not re.fullmatch(row.leaves, path)}
    assert not left


def test_there_are_at_least_200() -> None:
    assert len({(row.arguments, row.prepare) for row in ROWS}) >= 200
