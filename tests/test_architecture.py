"""The tree tells the architecture: rules R1 to R8, the order of imports, and what a reader may expect of every file."""

import pathlib
import subprocess
import sys

import pytest

from tests import rules
from tests.harness import REPOSITORY
from tests.rules import PACKAGES, Source

# The order in which to read the files; a file imports only from lines above it.
ORDER = [
    "zeroshard/config.py",
    "zeroshard/layout.py",
    "zeroshard/comm.py",
    "zeroshard/ops.py",
    "zeroshard/partial.py",
    "zeroshard/sharded.py",
    "zeroshard/parameter.py",
    "zeroshard/partition.py",
    "zeroshard/saved.py",
    "zeroshard/entry.py",
    "zeroshard/gradients.py",
    "zeroshard/unit.py",
    "zeroshard/schedule.py",
    "zeroshard/guard.py",
    "zeroshard/backward.py",
    "zeroshard/runtime.py",
    "zeroshard/hooks.py",
    "zeroshard/whole.py",
    "zeroshard/optimizer.py",
    "zeroshard/reading.py",
    "zeroshard/join.py",
    "zeroshard/ema.py",
    "zeroshard/checkpoint/plan.py",
    "zeroshard/checkpoint/together.py",
    "zeroshard/checkpoint/contents.py",
    "zeroshard/checkpoint/files.py",
    "zeroshard/checkpoint/index.py",
    "zeroshard/checkpoint/folder.py",
    "zeroshard/checkpoint/save.py",
    "zeroshard/checkpoint/load.py",
    "zeroshard/checkpoint/tensorfile.py",
    "zeroshard/checkpoint/export.py",
    "zeroshard/checkpoint/filling.py",
    "zeroshard/checkpoint/materialize.py",
    "zeroshard/checkpoint/convert.py",
    "zeroshard/checkpoint/__init__.py",
    "zeroshard/memory/ledger.py",
    "zeroshard/memory/estimate.py",
    "zeroshard/memory/__init__.py",
    "zeroshard/stats.py",
    "zeroshard/trace.py",
    "zeroshard/api.py",
    "zeroshard/integrations/parallelism.py",
    "zeroshard/integrations/context.py",
    "zeroshard/integrations/accelerate.py",
    "zeroshard/integrations/losses.py",
    "zeroshard/integrations/transformers.py",
    "zeroshard/integrations/lightning.py",
    "zeroshard/integrations/pretrained.py",
    "zeroshard/integrations/__init__.py",
    "zeroshard/cli/terminal.py",
    "zeroshard/cli/checkpoints.py",
    "zeroshard/cli/comm.py",
    "zeroshard/cli/machine.py",
    "zeroshard/cli/doctor.py",
    "zeroshard/cli/model.py",
    "zeroshard/cli/run.py",
    "zeroshard/cli/plots.py",
    "zeroshard/cli/estimate.py",
    "zeroshard/cli/page.py",
    "zeroshard/cli/report.py",
    "zeroshard/cli/commands.py",
    "zeroshard/cli/__init__.py",
    "zeroshard/__main__.py",
    "zeroshard/__init__.py",
    "ring_attention/errors.py",
    "ring_attention/layouts.py",
    "ring_attention/masks.py",
    "ring_attention/plan.py",
    "ring_attention/lse.py",
    "ring_attention/sums.py",
    "ring_attention/kernels/reference.py",
    "ring_attention/kernels/flex.py",
    "ring_attention/kernels/cpu.py",
    "ring_attention/kernels/cuda.py",
    "ring_attention/kernels/__init__.py",
    "ring_attention/comm.py",
    "ring_attention/ring.py",
    "ring_attention/ulysses.py",
    "ring_attention/strategies.py",
    "ring_attention/setting.py",
    "ring_attention/attention.py",
    "ring_attention/captured.py",
    "ring_attention/inside.py",
    "ring_attention/decode.py",
    "ring_attention/batch.py",
    "ring_attention/loss.py",
    "ring_attention/integrations/generation.py",
    "ring_attention/integrations/calls.py",
    "ring_attention/integrations/transformers.py",
    "ring_attention/integrations/__init__.py",
    "ring_attention/context.py",
    "ring_attention/picture.py",
    "ring_attention/__main__.py",
    "ring_attention/__init__.py",
]


def r7_import_order(source: Source) -> list[str]:
    """A file imports only from files above it in ORDER, and not inside functions (integrations and the command line may).
    What is imported for annotations alone is not a dependency."""
    return rules.import_order(source, ORDER)


RULES = {
    "R1": rules.r1_communication_in_comm,
    "R2": rules.r2_hooks_in_hooks,
    "R3": rules.r3_storage_in_unit,
    "R4": rules.r4_choices_in_one_place,
    "R5": rules.r5_heavy_imports_when_called,
    "R6": rules.r6_packages_apart,
    "R7": r7_import_order,
    "R8": rules.r8_no_module_state,
    "size": rules.size,
    "notes": rules.nothing_left_to_do,
    "docstrings": rules.docstrings,
}


def paths_of(package: str) -> list[str]:
    files = sorted((REPOSITORY / package).rglob("*.py"))
    return [str(pathlib.PurePosixPath(file.relative_to(REPOSITORY))) for file in files]


PATHS = [path for package in PACKAGES for path in paths_of(package)]


def read(path: str) -> Source:
    return Source(path, (REPOSITORY / path).read_text(), frozenset(PATHS))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rule", RULES)
def test_rule(path: str, rule: str) -> None:
    broken = RULES[rule](read(path))
    assert not broken, f"{RULES[rule].__doc__}\n" + "\n".join(f"{path}:{line}" for line in broken)


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_is_there_and_says_what_is_public(package: str) -> None:
    assert paths_of(package), f"no files in {package}/"
    public = rules.public_names(read(f"{package}/__init__.py"))
    assert public, f"{package}/__init__.py has no __all__"
    assert len(public) == len(set(public))


@pytest.mark.parametrize("package", PACKAGES)
def test_what_a_package_exports_has_docstrings(package: str) -> None:
    public = rules.public_names(read(f"{package}/__init__.py"))
    missing = [f"{path}:{line}" for path in paths_of(package) for line in rules.undocumented(read(path), public or [])]
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize("package", PACKAGES)
def test_importing_a_package_imports_no_integration(package: str) -> None:
    code = f"import torch, sys; before = set(sys.modules); import {package}; print(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, timeout=120)
    assert done.returncode == 0, done.stderr
    assert not {module.split(".")[0] for module in done.stdout.split()} & {*rules.HEAVY, "click", "matplotlib"}


@pytest.mark.parametrize("package", PACKAGES)
def test_one_file_reads_the_environment(package: str) -> None:
    readers = [path for path in paths_of(package) if rules.environment_lines(read(path))]
    assert len(readers) <= 1, readers


def test_the_order_names_each_file_once() -> None:
    assert len(ORDER) == len(set(ORDER))


BREAKS = [
    ("R1", "zeroshard/unit.py", "import torch.distributed as dist"),
    ("R1", "zeroshard/unit.py", "from torch import distributed"),
    ("R1", "zeroshard/unit.py", "import torch\ndef f(x): torch.distributed.all_reduce(x)"),
    ("R1", "zeroshard/unit.py", "import torch\ntorch.ops.c10d.barrier"),
    ("R1", "zeroshard/unit.py", "import torch\nside = torch.cuda.Stream()"),
    ("R1", "zeroshard/unit.py", "from torch.cuda import current_stream\ncurrent_stream()"),
    ("R1", "zeroshard/unit.py", "def f(x, s): x.record_stream(s)"),
    ("R1", "zeroshard/checkpoint/save.py", "import torch.distributed as dist"),
    ("R1", "ring_attention/attention.py", "from torch.distributed import ProcessGroup"),
    ("R2", "zeroshard/unit.py", "def f(m): m.register_forward_pre_hook(f)"),
    ("R2", "zeroshard/unit.py", "def f(p): p.register_post_accumulate_grad_hook(f)"),
    ("R2", "zeroshard/optimizer.py", "def f(m): m.register_forward_hook(f)"),
    ("R2", "ring_attention/integrations/transformers.py", "def f(m): m.register_forward_pre_hook(f)"),
    ("R2", "zeroshard/unit.py", "import torch\nclass F(torch.autograd.Function): pass"),
    ("R2", "zeroshard/unit.py", "from torch.autograd import Function as G\nclass F(G): pass"),
    ("R2", "ring_attention/context.py", "import torch\n@torch.library.custom_op('a::b', mutates_args=())\ndef f(): 0"),
    ("R2", "zeroshard/unit.py", "from torch.autograd.graph import saved_tensors_hooks\nsaved_tensors_hooks(1, 2)"),
    ("R3", "zeroshard/sharded.py", "def f(p): p.untyped_storage().resize_(0)"),
    ("R3", "zeroshard/sharded.py", "def f(p, q): p.data = q"),
    ("R3", "zeroshard/sharded.py", "def f(p, q): p.set_(q)"),
    ("R3", "zeroshard/sharded.py", "def f(p, q): setattr(p, 'data', q)"),
    ("R4", "zeroshard/runtime.py", "def f(stage): return stage >= 2"),
    ("R4", "zeroshard/runtime.py", "def f(self): return self.config.stage in (1, 2)"),
    ("R4", "zeroshard/runtime.py", "def f(kw): return 3 == kw['stage']"),
    ("R4", "zeroshard/runtime.py", "def f(stage): return stage is Stage.PARAMETERS"),
    ("R4", "zeroshard/runtime.py", "def f(stage):\n match stage:\n  case 1: pass"),
    ("R4", "ring_attention/plan.py", "def f(layout): return layout.name == 'zigzag'"),
    ("R4", "ring_attention/plan.py", "def f(layout): return isinstance(layout, (ZigZag, int))"),
    ("R4", "ring_attention/plan.py", "def f(layout): return type(layout) is layouts.Striped"),
    ("R5", "zeroshard/api.py", "import accelerate"),
    ("R5", "zeroshard/api.py", "def f(): import transformers.utils"),
    ("R5", "ring_attention/kernels/cuda.py", "from flash_attn import flash_attn_func"),
    ("R5", "zeroshard/integrations/__init__.py", "from transformers import Trainer"),
    ("R6", "zeroshard/api.py", "def f(): import ring_attention"),
    ("R6", "zeroshard/integrations/accelerate.py", "from ring_attention import ContextParallel"),
    ("R6", "ring_attention/context.py", "import importlib\nimportlib.import_module('zeroshard.api')"),
    ("R7", "zeroshard/layout.py", "from zeroshard import unit"),
    ("R7", "zeroshard/layout.py", "from .unit import Unit"),
    ("R7", "zeroshard/checkpoint/plan.py", "from ..api import shard"),
    ("R7", "zeroshard/unit.py", "def f(): from . import layout"),
    ("R7", "zeroshard/unit.py", "import zeroshard"),
    ("R7", "zeroshard/unheard_of.py", ""),
    ("R8", "zeroshard/unit.py", "cache = {}"),
    ("R8", "zeroshard/unit.py", "SEEN = set()\ndef f(x): SEEN.add(x)"),
    ("R8", "zeroshard/unit.py", "TABLE: dict[str, int] = {}\ndef f(x): TABLE[x] = 1"),
    ("R8", "zeroshard/unit.py", "class A:\n    seen = []"),
    ("R8", "zeroshard/unit.py", "N = 0\ndef f():\n    global N\n    N += 1"),
    ("R8", "zeroshard/unit.py", "import weakref\nGROUPS = weakref.WeakKeyDictionary()"),
    ("R8", "zeroshard/unit.py", "import os\ndef f(): return os.environ['A']"),
    ("R8", "zeroshard/unit.py", "from os import getenv\ndef f(): return getenv('A')"),
    ("R8", "zeroshard/config.py", "import os\ndef f(): os.getenv('A')\ndef g(): os.environ['B']"),
    ("size", "zeroshard/unit.py", "x = 1\n" * 351),
    ("size", "zeroshard/unit.py", "def f():\n" + "    x = 1\n" * 70),
    ("notes", "zeroshard/unit.py", "x = 1  # TODO: later"),
    ("docstrings", "zeroshard/unit.py", '"""A file."""\n__all__ = ["f"]\ndef f(): pass'),
    ("docstrings", "zeroshard/unit.py", "x = 1"),
]

KEEPS = [
    ("R1", "zeroshard/comm.py", "import torch.distributed as dist\ndist.barrier()"),
    (
        "R1",
        "zeroshard/unit.py",
        "import typing\nif typing.TYPE_CHECKING:\n    import torch.distributed as dist",
    ),
    ("R1", "zeroshard/checkpoint/save.py", "import torch.distributed.checkpoint as dcp\ndcp.save({})"),
    ("R2", "zeroshard/optimizer.py", "def f(o): o.register_step_pre_hook(f)"),
    ("R2", "ring_attention/attention.py", "import torch\ntorch.library.custom_op"),
    ("R3", "zeroshard/unit.py", "def f(p, q): p.data = q"),
    ("R3", "zeroshard/sharded.py", "def f(p, q): return p.data"),
    ("R4", "zeroshard/config.py", "def f(stage): return stage >= 2"),
    ("R4", "ring_attention/__init__.py", "__all__ = ['ZigZag']"),
    ("R4", "ring_attention/context.py", "def f(layout=ZigZag): pass"),
    ("R5", "zeroshard/integrations/accelerate.py", "import accelerate"),
    ("R5", "ring_attention/kernels/cuda.py", "def f(): import flash_attn"),
    ("R6", "zeroshard/integrations/accelerate.py", "def f(): import ring_attention"),
    ("R7", "zeroshard/unit.py", "from .layout import FlatLayout\nfrom zeroshard import comm"),
    (
        "R8",
        "zeroshard/unit.py",
        "import logging\n__all__ = ['f']\nTABLE = {1: 2}\nlog = logging.getLogger()",
    ),
]


@pytest.mark.parametrize(("rule", "path", "text"), BREAKS)
def test_a_broken_rule_is_seen(rule: str, path: str, text: str) -> None:
    assert RULES[rule](Source(path, text, frozenset(ORDER)))


@pytest.mark.parametrize(("rule", "path", "text"), KEEPS)
def test_a_kept_rule_is_not_blamed(rule: str, path: str, text: str) -> None:
    assert RULES[rule](Source(path, text, frozenset(ORDER))) == []
