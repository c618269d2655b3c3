"""The command line: doctor, estimate, report, completion; what `--json` prints, exit statuses, mistakes in one line."""

import base64
import dataclasses
import html.parser
import importlib.metadata
import io
import json
import pathlib
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable

import pytest
import torch
from click.shell_completion import ShellComplete
from PIL import Image
from safetensors.torch import save_file

import zeroshard
from tests.harness import run_program
from tests.zero.test_checkpoint_convert import command
from zeroshard.cli import machine
from zeroshard.cli.commands import commands

COMMANDS = ("doctor", "estimate", "report", "inspect", "convert")
BROWSERS = ("chromium", "chromium-headless-shell", "google-chrome", "chrome")


def answer(*arguments: object) -> dict:
    return json.loads(command(*arguments, "--json").check().stdout)


def mistake(status: int, *arguments: object) -> str:
    """What is said of a mistake: nothing on the standard output, no traceback."""
    done = command(*arguments)
    assert done.returncode == status and "Traceback" not in done.stderr, done
    assert done.stdout == ""
    return done.stderr


# ------------------------------------------------------------------------------------------------- in common


def test_the_help_tells_commands_and_statuses() -> None:
    text = command("--help").check().stdout
    assert all(name in text for name in (*COMMANDS, "Exit status", "is not installed"))
    for name in COMMANDS:
        assert "--json" in command(name, "--help").check().stdout


def test_the_version_is_that_of_the_package() -> None:
    try:
        version = importlib.metadata.version("zeroshard")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("runs from the source tree, not installed")
    assert version in command("--version").check().stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str) -> None:
    script = command("completion", shell).check().stdout
    assert "_ZEROSHARD_COMPLETE" in script
    completed = ShellComplete(commands, {}, "zeroshard", "_ZEROSHARD_COMPLETE").get_completions([], "in")
    assert [item.value for item in completed] == ["inspect"]


@pytest.mark.parametrize(
    ("status", "arguments", "words"),
    [
        (2, ("estimat",), ["estimat"]),
        (2, ("estimate", "{}/nowhere"), ["nowhere", "does not exist"]),
        (2, ("estimate", "{}", "--ranks", "1,two"), ["--ranks", "1,two", "1,2,4"]),
        (2, ("estimate", "{}", "--ranks", "0"), ["--ranks", "1 or more"]),
        (2, ("estimate", "{}", "--stages", "4"), ["--stages"]),
        (2, ("estimate", "{}", "--context", "2"), ["--seq-len"]),
        (2, ("estimate", "{}", "--ranks", "2", "--context", "3", "--seq-len", "8"), ["--context", "--ranks"]),
        (1, ("estimate", "{}"), ["safetensors"]),
        (1, ("report", "{}"), ["metrics.jsonl"]),
        (1, ("inspect", "{}"), ["{}"]),
    ],
)
def test_a_mistake_names_what_to_put_right(tmp_path: pathlib.Path, status: int, arguments: tuple, words: list[str]) -> None:
    said = mistake(status, *(argument.format(tmp_path) for argument in arguments))
    assert all(word.format(tmp_path) in said for word in words), said


@pytest.mark.parametrize(
    ("package", "arguments", "remedy"),
    [
        ("matplotlib", ("report", "{}"), "zeroshard[cli]"),
        ("transformers", ("estimate", "{}/config.json"), "zeroshard[hf]"),
        ("rich", ("doctor", "--quick"), "pip install click rich"),
    ],
)
def test_a_package_that_is_missing_is_named(tmp_path: pathlib.Path, package: str, arguments: tuple, remedy: str) -> None:
    metrics(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    line = [argument.format(tmp_path) for argument in arguments]
    code = f"import sys; sys.modules[{package!r}] = None; from zeroshard.cli import main; main()"
    done = run_program([sys.executable, "-c", code, *line])
    assert done.returncode == 3 and done.stdout == "", done
    assert package in done.stderr and remedy in done.stderr and done.stderr.count("\n") == 1


def test_checkpoints_as_json(tmp_path: pathlib.Path) -> None:
    save_file({"a": torch.zeros(3, 4), "b": torch.zeros(2, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    checkpoint = tmp_path / "checkpoint"
    assert answer("convert", tmp_path / "model.safetensors", checkpoint) == {"tensors": 2, "out": str(checkpoint)}
    told = answer("inspect", checkpoint, "--tensors")
    assert told["categories"] == {"model": {"tensors": 2, "bytes": 52}} and told["problems"] == []
    assert told["tensors"]["model.a"] == {"dtype": "float32", "shape": [3, 4], "boxes": 1}
    file = next(checkpoint.rglob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])
    damaged = command("inspect", checkpoint, "--json")
    assert damaged.returncode == 1 and file.name in damaged.stderr
    assert len(json.loads(damaged.stdout)["problems"]) == 1


# ------------------------------------------------------------------------------------------------- doctor


def test_doctor_measures_two_ranks_of_its_own() -> None:
    told = json.loads(run_program([sys.executable, "-m", "zeroshard", "doctor", "--json"]).check().stdout)
    speed = told["speed"]
    assert (speed["ranks"], speed["backend"], speed["device"]) == (2, "gloo", "cpu")
    assert min(speed["gather_bytes_per_s"], speed["reduce_bytes_per_s"], speed["latency_s"]) > 0
    assert told["packages"]["torch"] == torch.__version__ or torch.__version__.startswith(told["packages"]["torch"])
    assert "gloo" in told["backends"] and told["cores"] >= 1


def test_doctor_shows_a_table() -> None:
    text = command("doctor", "--quick").check().stdout
    assert all(word in text for word in ("torch", "backends", "/dev/shm", "open files", "gloo takes"))


@pytest.mark.parametrize(
    ("change", "level", "words"),
    [
        ({"backends": []}, "error", ["torch.distributed"]),
        ({"interface": None, "host": "box"}, "warning", ["box", "GLOO_SOCKET_IFNAME"]),
        ({"interface": "lo"}, "note", ["lo", "GLOO_SOCKET_IFNAME"]),
        ({"shm_bytes": 64 << 20}, "warning", ["/dev/shm", "64 MiB", "--shm-size"]),
        ({"open_files": 256}, "warning", ["256", "ulimit -n 4096"]),
        ({"environment": {"OMP_NUM_THREADS": "1"}, "physical_cores": 8}, "note", ["OMP_NUM_THREADS", "8 cores"]),
        ({"packages": {"accelerate": None, "matplotlib": "3"}}, "warning", ["accelerate", "torchrun"]),
        ({"packages": {"accelerate": "1", "matplotlib": None}}, "note", ["matplotlib", "zeroshard[cli]"]),
    ],
)
def test_what_doctor_finds(change: dict, level: str, words: list[str]) -> None:
    good = dataclasses.replace(
        machine.look(), packages={"accelerate": "1", "matplotlib": "3"}, backends=["gloo"], devices=[], interface="eth0",
        shm_bytes=8 << 30, open_files=65536, environment={}, physical_cores=2,
    )  # fmt: skip
    assert machine.judge(good) == []
    (found,) = machine.judge(dataclasses.replace(good, **change))
    assert found.level == level and all(word in f"{found.what} {found.remedy}" for word in words), found


# ------------------------------------------------------------------------------------------------- estimate


@pytest.fixture
def llama(tmp_path: pathlib.Path) -> pathlib.Path:
    transformers = pytest.importorskip("transformers")
    transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2
    ).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def by_choice(told: dict) -> dict[tuple[int, int, int], dict]:
    return {(row["ranks"], row["context"], row["stage"]): row for row in told["rows"]}


def test_estimate_of_a_configuration_is_the_closed_form(llama: pathlib.Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    told = answer("estimate", llama, "--ranks", "1,4", "--optimizer", "momentum")
    rows, precision = by_choice(told), zeroshard.Precision(compute=torch.bfloat16)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(llama))
    assert told["model"] == "llama" and told["parameters"] == sum(p.numel() for p in model.parameters())
    assert set(rows) == {(ranks, 1, stage) for ranks in (1, 4) for stage in range(4)}
    for (ranks, _, stage), row in rows.items():
        sgd = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        want = zeroshard.estimate(model, stage=stage, world_size=ranks, optimizer=sgd, precision=precision)
        assert row["categories"] == dict(want) and row["total"] == want.total


def test_activations_are_what_autograd_keeps(llama: pathlib.Path) -> None:
    """Counted on the meta device; here on values, with the fused kernel of the CPU."""
    from transformers import AutoConfig, AutoModelForCausalLM

    arguments = ("estimate", llama, "--ranks", "4", "--stages", "3", "--seq-len", "96", "--batch-size", "2")
    rows = by_choice(answer(*arguments, "--context", "1,2,4", "--precision", "none"))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(llama), attn_implementation="sdpa")
    own = {x.untyped_storage().data_ptr() for x in [*model.parameters(), *model.buffers()]}
    for degree in (1, 2, 4):
        kept: dict[int, torch.UntypedStorage] = {}

        def pack(x: torch.Tensor, kept: dict[int, torch.UntypedStorage] = kept) -> torch.Tensor:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            model(torch.zeros(2, 96 // degree, dtype=torch.long), use_cache=False)
        want = sum(storage.nbytes() for address, storage in kept.items() if address not in own)
        assert rows[4, degree, 3]["categories"]["activations"] == want
    less = by_choice(answer(*arguments, "--recompute", "--precision", "none"))
    assert less[4, 1, 3]["total"] < rows[4, 1, 3]["total"]


def test_estimate_of_safetensors_alone(tmp_path: pathlib.Path) -> None:
    """The names tell the modules, so that units are those of the model; dtypes are those of the file."""
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(20, 8), "layers": torch.nn.ModuleList()})
    model["layers"].extend(torch.nn.Sequential(torch.nn.Linear(8, 24), torch.nn.Linear(24, 8)) for _ in range(4))
    save_file(dict(model.bfloat16().state_dict()), tmp_path / "model.safetensors")
    rows = by_choice(answer("estimate", tmp_path, "--ranks", "2", "--precision", "none"))
    for stage in range(4):
        assert rows[2, 1, stage]["categories"] == dict(zeroshard.estimate(model, stage=stage, world_size=2))
    assert "config.json" in mistake(1, "estimate", tmp_path, "--seq-len", "8")


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_estimate_draws(llama: pathlib.Path, tmp_path: pathlib.Path, ending: str) -> None:
    plot = tmp_path / f"plot.{ending}"
    text = command("estimate", llama, "--ranks", "1,2", "--device-memory", "1", "--plot", plot).check().stdout
    assert "stage 3" in text and "✓" in text and str(plot) in text
    if ending == "png":
        image = Image.open(plot)
        assert image.width > 500 and len(image.getcolors(1 << 24)) > 20
    else:
        assert ElementTree.parse(plot).getroot().tag.endswith("svg")
    assert "ending" in command("estimate", llama, "--ranks", "1", "--plot", tmp_path / "plot.word").stderr


# ------------------------------------------------------------------------------------------------- report


def metrics(folder: pathlib.Path, **about: object) -> pathlib.Path:
    """A run of three steps on two ranks, with numbers that are easily divided."""
    memory = {"predicted": {"parameters": 100, "optimizer": 200}, "held": {"parameters": 100, "optimizer": 210}}
    lines = [
        {"kind": "run", "step": 0, "ranks": 2, "model": "<small> & co", "flops_per_token": 1e6, "rank_flops": 1e9,
         "options": {"stage": 3, "data": "a<b>"}, **about},
        {"kind": "eval", "step": 0, "loss": 4.0},
        *({"kind": "train", "step": n, "loss": 4.0 - n, "tokens_per_s": 100.0 * n, "memory_bytes": [7, 8]} for n in (1, 2, 3)),
        {"kind": "eval", "step": 3, "loss": 1.5},
        *({"kind": "memory", "rank": rank, **memory, "process": 1000 + rank} for rank in (0, 1)),
        {"kind": "unheard of", "step": 3},
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def traces(folder: pathlib.Path) -> None:
    """One step of each of two ranks, times in µs."""

    def event(lane: str, name: str, start: int, length: int, **arguments: object) -> dict:
        return {"ph": "X", "pid": 0, "tid": 0, "cat": lane, "name": name, "ts": start, "dur": length, "args": arguments}

    for rank in (0, 1):
        events = [
            event("compute", "forward Net", 0, 9000),
            event("gather", "gather blocks.0", 0, 3000, unit="blocks.0", exposed_us=1000 + 1000 * rank, hidden_us=2000),
            event("gather", "gather blocks.0", 5000, 1000, unit="blocks.0", exposed_us=0, hidden_us=1000),
            event("ring", f"keys from rank {1 - rank}", 6000, 1000, exposed_us=500, hidden_us=500),
            event("compute", "wait: gather blocks.0", 0, 1000),
            event("compute", "step AdamW", 9000, 1000),
        ]
        content = {"traceEvents": events, "otherData": {"rank": rank}}
        (folder / f"trace.rank{rank}.json").write_text(json.dumps(content))


def test_report_counts(tmp_path: pathlib.Path) -> None:
    traces(metrics(tmp_path))
    told = answer("report", tmp_path)
    assert not (tmp_path / "report.html").exists(), "with --json a page only where it is asked for"
    assert (told["steps"], told["loss"], told["held_out_loss"]) == (3, 1.0, 1.5)
    assert told["tokens_per_s"] == 250.0, "the first step warms up"
    assert told["mfu"] == pytest.approx(250 * 1e6 / 2e9)
    differences = {(row["rank"], row["category"]): row["difference"] for row in told["memory"]}
    assert differences[1, "parameters"] == 0 and differences[1, "optimizer"] == pytest.approx(0.05)
    assert told["process_bytes"] == {"0": 1000, "1": 1001}
    assert told["communication"] == [
        {"kind": "gather", "unit": "blocks.0", "count": 2.0, "exposed_ms": 1.5, "hidden_ms": 3.0},
        {"kind": "ring", "unit": "keys", "count": 1.0, "exposed_ms": 0.5, "hidden_ms": 0.5},
    ]


class Page(html.parser.HTMLParser):
    """What a page refers to, its images by name, its text; every tag that is opened is closed."""

    def __init__(self, text: str):
        super().__init__()
        self.images: dict[str, str] = {}
        self.references: list[str] = []
        self.text, self._open = "", list[str]()
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        told = dict(attributes)
        self.references += [value or "" for name, value in attributes if name in ("src", "href", "srcset", "action")]
        if tag == "img":
            self.images[told["alt"] or ""] = told["src"] or ""
        elif tag != "meta":
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_holds_all_it_needs(tmp_path: pathlib.Path) -> None:
    traces(metrics(tmp_path))
    text = command("report", tmp_path).check().stdout
    assert "loss 1.0000" in text and "MFU 12.5%" in text and "report.html" in text
    source = (tmp_path / "report.html").read_text()
    page = Page(source)
    assert all(reference.startswith("data:") for reference in page.references), "nothing is fetched"
    assert "@import" not in source and "url(" not in source and "<script" not in source
    assert list(page.images) == ["loss", "speed", "memory", "timeline", "communication"]
    for image in page.images.values():
        kind, _, content = image.partition(";base64,")
        drawing = ElementTree.fromstring(base64.b64decode(content, validate=True))
        assert kind == "data:image/svg+xml" and drawing.tag.endswith("svg")
        assert len(list(drawing.iter("{http://www.w3.org/2000/svg}path"))) > 20
    assert "<small> & co" in page.text and "a<b>" in page.text, "names are text, not markup"
    for number in ("1.0000", "1.5000", "250", "12.5%", "+5.0%", "blocks.0"):
        assert number in page.text, number


def test_a_browser_shows_the_page(tmp_path: pathlib.Path) -> None:
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed; the page is parsed and its images are read above")
    traces(metrics(tmp_path))
    command("report", tmp_path).check()
    shot = tmp_path / "page.png"
    line = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1100,2400", f"--screenshot={shot}"]
    subprocess.run([*line, (tmp_path / "report.html").as_uri()], timeout=60, check=True, capture_output=True)
    image = Image.open(io.BytesIO(shot.read_bytes())).convert("RGB")
    colours = {colour for _, colour in image.getcolors(1 << 24)}
    drawn = {"loss": (0x4C, 0x72, 0xB0), "held out": (0xDD, 0x84, 0x52), "speed": (0x55, 0xA8, 0x68),
             "exposed": (0xC4, 0x4E, 0x52), "hidden": (0xA6, 0xC8, 0xE0)}  # fmt: skip
    assert not [name for name, colour in drawn.items() if colour not in colours]


def test_a_run_without_the_rest_is_reported_too(tmp_path: pathlib.Path) -> None:
    lines = [{"kind": "run", "ranks": 1}, {"kind": "train", "step": 1, "loss": 2.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    told = answer("report", tmp_path / "metrics.jsonl", "--output", tmp_path / "page.html")
    assert told["tokens_per_s"] is None and told["mfu"] is None and told["memory"] == [] and told["communication"] == []
    assert list(Page((tmp_path / "page.html").read_text()).images) == ["loss"]


def spoilt(old: str, new: str) -> Callable[[pathlib.Path], None]:
    def spoil(folder: pathlib.Path) -> None:
        for path in (folder / "metrics.jsonl", folder / "trace.rank1.json"):
            path.write_text(path.read_text().replace(old, new))

    return spoil


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (spoilt('"kind": "eval"', '"kind": "eval'), ["line 2", "JSON"]),
        (spoilt('"loss": 3.0', '"loss": null'), ["line 3", "'loss'"]),
        (spoilt('"train"', '"rain"'), ["train"]),
        (spoilt('"run"', '"sun"'), ["run", "ranks"]),
        (spoilt('"traceEvents"', '"events"'), ["trace.rank1.json"]),
    ],
)
def test_a_run_that_cannot_be_read_is_named(tmp_path: pathlib.Path, spoil: Callable, words: list[str]) -> None:
    traces(metrics(tmp_path))
    spoil(tmp_path)
    said = mistake(1, "report", tmp_path)
    assert said.count("\n") == 1 and all(word in said for word in words), said
    assert not (tmp_path / "report.html").exists()


