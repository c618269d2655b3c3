"""Runs the main example several times in one launch: `finetune_many.py '[["--stage", "1", ...], [...]]'`.

Starting a launcher with its ranks takes longer than a short run, so the runs of one number of ranks share them.
"""

import json
import pathlib
import sys

from accelerate.state import AcceleratorState, GradientState, PartialState
from rich.console import Console

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples"))
import finetune_long_context as example
from finetune.options import parse

for arguments in json.loads(sys.argv[1]):
    AcceleratorState._reset_state()  # each run reads its degrees anew; the process group stays
    GradientState._reset_state()
    example.train(parse(arguments), Console(quiet=True))
PartialState().destroy_process_group()
