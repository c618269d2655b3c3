"""The command line: what is in a checkpoint, and to and from safetensors; mistakes are answered by one line."""

import contextlib
import io
import pathlib
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import zeroshard
from tests.harness import Finished, RankPools, assert_equal, run_program
from tests.models import CASES
from tests.zero.checkpoints import files_in, pair, steps
from zeroshard.cli import main


def command(*arguments: object) -> Finished:
    """The console script's function, as `zeroshard ARGUMENTS` calls it."""
    line = ["zeroshard", *map(str, arguments)]
    out, err, status = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", line)
        try:
            main()
        except SystemExit as left:
            status = int(left.code or 0)
    return Finished(line, status, out.getvalue(), err.getvalue())


def save_one(rank: int, world: int, path: str) -> dict[str, torch.Tensor]:
    model, opt = pair("tied", "adamw", stage=3)
    ema = zeroshard.EMA(model, 0.5)
    steps(model, opt, "tied", range(2), rank)
    ema.update()
    zeroshard.save(path, model, opt, ema=ema, extra={"step": 2, "note": "odd"})
    whole = zeroshard.full_state_dict(model)
    with ema.applied():
        return {
            f"{kind}.{n}": values[n]
            for kind, values in (("model", whole), ("ema", zeroshard.full_state_dict(model)))
            for n, _ in model.named_parameters()
        }


def load_one(rank: int, world: int, path: str) -> dict[str, torch.Tensor]:
    model, _ = pair("net", "adamw", seed=5, stage=3)
    zeroshard.load(path, model)
    return zeroshard.full_state_dict(model)


def test_inspect_and_to_safetensors(ranks: RankPools, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "checkpoint"
    whole = ranks(2).run(save_one, str(path))[0]
    text = command("inspect", path, "--tensors").check().stdout
    for expected in (
        "optimizer state",
        "averages",
        "lr=0.01",
        "'step': 2",
        "tokens.weight  float32 [37, 12]",
        "checksums are right",
    ):
        assert expected in text, text
    for kind, flags in (("model", []), ("ema", ["--average", "--max-file-bytes", "900"])):
        command("convert", path, tmp_path / kind, *flags).check()
        read = {name: value for file in (tmp_path / kind).glob("*.safetensors") for name, value in load_file(file).items()}
        assert_equal(read, {n.removeprefix(f"{kind}."): v for n, v in whole.items() if n.startswith(f"{kind}.")})
    file = next(file for file in files_in(path) if file.name == "__1_0.distcp")
    file.write_bytes(file.read_bytes()[:-1])
    for arguments in (("inspect", path), ("convert", path, tmp_path / "again")):
        failed = command(*arguments)
        assert failed.returncode == 1 and "__1_0.distcp" in failed.stderr and "Traceback" not in failed.stderr
    assert not (tmp_path / "again").exists()


def test_from_safetensors(ranks: RankPools, tmp_path: pathlib.Path) -> None:
    want = dict(CASES["net"].build(3).state_dict())
    save_file(want, tmp_path / "model.safetensors")
    command("convert", tmp_path / "model.safetensors", tmp_path / "checkpoint").check()
    for values in ranks(2).run(load_one, str(tmp_path / "checkpoint")):
        assert_equal(values, want)


@pytest.mark.parametrize("arguments", [("inspect", "{}"), ("inspect", "{}/nowhere"), ("convert", "{}", "{}/out")])
def test_a_mistake_is_one_line(tmp_path: pathlib.Path, arguments: tuple[str, ...]) -> None:
    failed = command(*(argument.format(tmp_path) for argument in arguments))
    assert failed.returncode in (1, 2) and str(tmp_path) in failed.stderr and "Traceback" not in failed.stderr


def test_the_module_is_the_command() -> None:
    text = run_program([sys.executable, "-m", "zeroshard", "--help"]).check().stdout
    assert "inspect" in text and "convert" in text
