"""The rules of the architecture as functions from a source file to the list of what breaks them.

`test_architecture.py` runs every rule over every file of the two packages, and over small files that break it.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import pathlib
import re
from collections.abc import Iterator

PACKAGES = ("zeroshard", "ring_attention")
HEAVY = ("accelerate", "transformers", "lightning", "pytorch_lightning", "flash_attn", "trl", "peft", "datasets")
LAYOUTS = ("Contiguous", "ZigZag", "Striped", "Balanced")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclasses.dataclass(frozen=True)
class Import:
    line: int
    module: str  # absolute; for `from a import b` this is "a", but "a.b" if b is a module of ours or a is not ours
    in_function: bool
    for_types: bool  # under `if TYPE_CHECKING`


@dataclasses.dataclass(frozen=True)
class Source:
    """One parsed file: `path` is relative to the repository, e.g. "zeroshard/comm.py"."""

    path: str
    text: str
    siblings: frozenset[str] = frozenset()  # paths of all files, to tell modules from names

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @property
    def package(self) -> str:
        return self.path.split("/")[0]

    @property
    def name(self) -> str:
        return pathlib.PurePosixPath(self.path).name

    def is_in(self, *folders: str) -> bool:
        return any(part in folders for part in self.path.split("/")[1:-1])

    @functools.cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        return {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        while node in self.parents:
            node = self.parents[node]
            yield node

    def in_function(self, node: ast.AST) -> bool:
        return any(isinstance(above, Function) for above in self.ancestors(node))

    def for_types(self, node: ast.AST) -> bool:
        tests = [above.test for above in self.ancestors(node) if isinstance(above, ast.If)]
        return any(_last_name(test) == "TYPE_CHECKING" for test in tests)

    @functools.cached_property
    def imports(self) -> list[Import]:
        return [
            Import(node.lineno, module, self.in_function(node), self.for_types(node))
            for node in ast.walk(self.tree)
            for module in self._modules_of(node)
        ]

    def _modules_of(self, node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = self._absolute(node)
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield full if self.file_of(full) or base.split(".")[0] not in PACKAGES else base
        elif isinstance(node, ast.Call) and _last_name(node.func) in ("import_module", "__import__") and node.args:
            yield node.args[0].value if isinstance(node.args[0], ast.Constant) else "<unknown>"

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        folder = self.path.split("/")[: -node.level]
        return ".".join([*folder, *(node.module.split(".") if node.module else [])])

    def file_of(self, module: str) -> str | None:
        """The file of a module of ours, or None for others and for names that are not modules."""
        base = module.replace(".", "/")
        return next((path for path in (f"{base}.py", f"{base}/__init__.py") if path in self.siblings), None)

    @functools.cached_property
    def aliases(self) -> dict[str, str]:
        """Local name -> dotted name, for imports that exist at run time."""
        names = {}
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)) and not self.for_types(node):
                prefix = "" if isinstance(node, ast.Import) else self._absolute(node) + "."
                for alias in node.names:
                    local = alias.asname or (alias.name if prefix else alias.name.split(".")[0])
                    names[local] = prefix + (alias.name if prefix or alias.asname else local)
        return names

    def dotted(self, node: ast.AST) -> str:
        """`dist.all_reduce` -> "torch.distributed.all_reduce"; "" if it does not start at a name."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        return ".".join([self.aliases.get(node.id, node.id), *reversed(parts)]) if isinstance(node, ast.Name) else ""

    def walk(self, *kinds: type[ast.AST]) -> Iterator[ast.AST]:
        return (node for node in ast.walk(self.tree) if isinstance(node, kinds))


def _last_name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _within(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


# ------------------------------------------------------------------------------------------------- R1 to R8


def r1_communication_in_comm(source: Source) -> list[str]:
    """torch.distributed, CUDA streams and events only in comm.py; checkpoint/ may use torch.distributed.checkpoint."""
    if source.name == "comm.py":
        return []
    collectives = ("torch.distributed", "torch.ops.c10d", "torch.ops._c10d_functional", "torch.cuda.nccl")
    allowed = ("torch.distributed.checkpoint",) if source.is_in("checkpoint") else ()
    streams = r"torch(\.(cuda|accelerator|xpu))?\.(Stream|Event|\w*stream|StreamContext|synchronize|ExternalStream)"
    found = []
    names = [(node.lineno, source.dotted(node)) for node in source.walk(ast.Attribute, ast.Name)]
    names += [(i.line, i.module) for i in source.imports if not i.for_types]
    for line, name in names:
        if (_within(name, *collectives) and not _within(name, *allowed)) or re.fullmatch(streams, name):
            found.append(f"{line}: {name}")
    for call in source.walk(ast.Call):
        if _last_name(call.func) in ("record_stream", "wait_stream", "wait_event", "record_event"):
            found.append(f"{call.lineno}: .{_last_name(call.func)}")
    return found


def r2_hooks_in_hooks(source: Source) -> list[str]:
    """Module and autograd hooks only in zeroshard/hooks.py; autograd functions and custom ops where listed."""
    if source.path == "zeroshard/hooks.py":
        return []
    allowed = r"(?!)"
    if source.path == "zeroshard/optimizer.py":
        allowed = r"register_(step|state_dict|load_state_dict)_(pre|post)_hook"
    elif source.is_in("integrations") and source.package == "zeroshard":  # accelerate's own, not a module's
        allowed = r"register_(save|load)_state_pre_hook"
    found = []
    for call in source.walk(ast.Call):
        name = _last_name(call.func)
        hook = re.fullmatch(r"_?register_\w*hook\w*|saved_tensors_hooks|queue_callback", name)
        if hook and not re.fullmatch(allowed, name):
            found.append(f"{call.lineno}: {name}")
    if source.path not in {f"ring_attention/{name}.py" for name in ("attention", "ulysses", "loss", "batch")}:
        for node in source.walk(ast.ClassDef):
            found += [f"{node.lineno}: {name}" for b in node.bases if _is_autograd_function(name := source.dotted(b))]
        names = [(node.lineno, source.dotted(node)) for node in source.walk(ast.Attribute, ast.Name)]
        found += [f"{line}: {name}" for line, name in names if _within(name, "torch.library")]
    return found


def _is_autograd_function(name: str) -> bool:
    return name.startswith("torch.") and name.endswith(("autograd.Function", "autograd.function.Function"))


def r3_storage_in_unit(source: Source) -> list[str]:
    """Storage is freed or swapped under a tensor only in unit.py."""
    if source.path == "zeroshard/unit.py":
        return []
    found = []
    for call in source.walk(ast.Call):
        name = _last_name(call.func)
        if name in ("resize_", "set_", "swap_tensors", "_resize_storage"):
            found.append(f"{call.lineno}: {name}")
        if name == "setattr" and len(call.args) > 1 and _constant(call.args[1]) == "data":
            found.append(f'{call.lineno}: setattr(..., "data", ...)')
    for node in source.walk(ast.Attribute):
        if node.attr == "data" and isinstance(node.ctx, ast.Store):
            found.append(f"{node.lineno}: assignment to .data")
    return found


def _constant(node: ast.AST) -> object:
    return node.value if isinstance(node, ast.Constant) else None


def r4_choices_in_one_place(source: Source) -> list[str]:
    """Stage numbers are compared only in zeroshard/config.py, layouts told apart only in ring_attention/layouts.py."""
    found = []
    if source.path != "zeroshard/config.py":
        for node in source.walk(ast.Compare):
            sides = [node.left, *node.comparators]
            if any(_is_stage(side) for side in sides) and any(_is_stage_value(source, side) for side in sides):
                found.append(f"{node.lineno}: {ast.unparse(node)}")
        found += [f"{n.lineno}: match stage" for n in source.walk(ast.Match) if _is_stage(n.subject)]
    if source.path != "ring_attention/layouts.py":
        lower = {name.lower() for name in LAYOUTS}
        for node in source.walk(ast.Constant):
            if isinstance(node.value, str) and node.value.lower() in lower and not _in_dunder_all(source, node):
                found.append(f'{node.lineno}: "{node.value}"')
        for node in source.walk(ast.Call):
            if _last_name(node.func) in ("isinstance", "issubclass") and _names_in(node.args[1:]) & set(LAYOUTS):
                found.append(f"{node.lineno}: {ast.unparse(node)}")
        for node in source.walk(ast.Compare, ast.MatchClass):
            if _names_in([node]) & set(LAYOUTS):
                found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


def _is_stage(node: ast.AST) -> bool:
    if isinstance(node, ast.Subscript):
        return _constant(node.slice) == "stage"
    if isinstance(node, ast.Call) and _last_name(node.func) == "int" and node.args:
        return _is_stage(node.args[0])
    return _last_name(node) == "stage"


def _is_stage_value(source: Source, node: ast.AST) -> bool:
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return any(_is_stage_value(source, item) for item in node.elts)
    return type(_constant(node)) is int or "Stage." in source.dotted(node)


def _names_in(nodes: list[ast.expr]) -> set[str]:
    return {_last_name(node) for top in nodes for node in ast.walk(top)}


def _in_dunder_all(source: Source, node: ast.AST) -> bool:
    assigned = [above.targets for above in source.ancestors(node) if isinstance(above, ast.Assign)]
    return any(_last_name(target) == "__all__" for targets in assigned for target in targets)


def r5_heavy_imports_when_called(source: Source) -> list[str]:
    """accelerate, transformers, ...: at the top only in the integration of that name, in functions only there and in
    kernels/."""
    found = []
    for i in source.imports:
        heavy = i.module.split(".")[0]
        if heavy not in HEAVY or (i.for_types and source.is_in("integrations", "kernels")):
            continue
        inside = source.is_in("integrations") or (source.is_in("kernels") and i.in_function)
        if not inside or (not i.in_function and source.name == "__init__.py"):
            found.append(f"{i.line}: {i.module}")
    return found


def r6_packages_apart(source: Source) -> list[str]:
    """The packages never import each other, except zeroshard/integrations, when called."""
    other = next(package for package in PACKAGES if package != source.package)
    lazily = source.package == "zeroshard" and source.is_in("integrations")
    return [
        f"{i.line}: {i.module}"
        for i in source.imports
        if _within(i.module, other) and not (lazily and (i.in_function or i.for_types))
    ]


def import_order(source: Source, order: list[str]) -> list[str]:
    """R7, for a given order of files."""
    if source.path not in order:
        return [f"1: {source.path} has no place in the order"]
    found = []
    for i in source.imports:
        target = source.file_of(i.module)
        if target is None or not _within(i.module, source.package) or i.for_types:
            continue
        if target not in order or order.index(target) >= order.index(source.path):
            found.append(f"{i.line}: {i.module} is not above")
        if i.in_function and not (source.is_in("integrations", "cli") or source.name == "__main__.py"):
            found.append(f"{i.line}: {i.module} inside a function")
    return found


MUTATORS = ("append", "add", "update", "setdefault", "pop", "popitem", "clear", "extend", "insert", "remove", "discard")
CONTAINERS = ("list", "dict", "set", "defaultdict", "deque", "OrderedDict", "Counter", "bytearray")
ALWAYS_STATE = ("WeakKeyDictionary", "WeakValueDictionary", "WeakSet", "local", "ContextVar", "count")


def r8_no_module_state(source: Source) -> list[str]:
    """Containers at module or class level are constants: upper case and never changed; no `global`; the environment
    is read in one function of one file."""
    found = [f"{node.lineno}: global {', '.join(node.names)}" for node in source.walk(ast.Global)]
    changed = _changed_names(source)
    for node in source.walk(ast.Assign, ast.AnnAssign):
        if source.in_function(node) or node.value is None:
            continue
        made = _last_name(node.value.func) if isinstance(node.value, ast.Call) else ""
        displays = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
        container = isinstance(node.value, displays) or made in CONTAINERS
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            name = _last_name(target)
            dunder = name.startswith("__") and name.endswith("__")
            if made in ALWAYS_STATE or (container and not dunder and (not name.isupper() or name in changed)):
                found.append(f"{node.lineno}: {name}")
    return found + _environment_reads(source)


def _changed_names(source: Source) -> set[str]:
    changed = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            changed.add(_last_name(node.func.value))
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
            changed.add(_last_name(node.value))
        elif isinstance(node, ast.AugAssign):
            changed.add(_last_name(node.target))
    return changed


def environment_lines(source: Source) -> list[int]:
    """Lines that read or write the process environment."""
    uses = [n for n in source.walk(ast.Attribute, ast.Name) if source.dotted(n) in ("os.environ", "os.getenv")]
    return sorted({node.lineno for node in uses})


def _environment_reads(source: Source) -> list[str]:
    lines = environment_lines(source)
    if source.package == "zeroshard" and source.path != "zeroshard/config.py":
        return [f"{line}: the environment is read in zeroshard/config.py" for line in lines]
    readers = {
        next((above.name for above in source.ancestors(node) if isinstance(above, Function)), "module")
        for node in source.walk(ast.Attribute, ast.Name)
        if source.dotted(node) in ("os.environ", "os.getenv")
    }
    return [f"{lines[0]}: the environment is read in {sorted(readers)}, not in one place"] if len(readers) > 1 else []


# ------------------------------------------------------------------------------------------------- house style


def size(source: Source, max_file_lines: int = 350, max_function_lines: int = 70) -> list[str]:
    """Files up to 350 lines, functions up to 70, docstrings included."""
    lines = len(source.text.splitlines())
    found = [f"1: {lines} lines"] if lines > max_file_lines else []
    for node in source.walk(*Function.__args__):
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length > max_function_lines:
            found.append(f"{node.lineno}: {node.name} has {length} lines")
    return found


def nothing_left_to_do(source: Source) -> list[str]:
    """No notes to oneself."""
    lines = enumerate(source.text.splitlines(), 1)
    return [f"{number}: {line.strip()}" for number, line in lines if re.search(r"\b(TODO|FIXME|XXX|HACK)\b", line)]


def public_names(source: Source) -> list[str] | None:
    """What `__all__` lists, or None without one."""
    for node in source.tree.body:
        if isinstance(node, ast.Assign) and any(_last_name(target) == "__all__" for target in node.targets):
            return [str(_constant(item)) for item in node.value.elts]  # type: ignore[attr-defined]
    return None


def undocumented(source: Source, public: list[str]) -> list[str]:
    """Functions and classes of a file that are public and have no docstring."""
    defined = [n for n in source.tree.body if isinstance(n, (ast.ClassDef, *Function.__args__)) and n.name in public]
    return [f"{node.lineno}: {node.name}" for node in defined if not ast.get_docstring(node)]


def docstrings(source: Source) -> list[str]:
    """A file, and every function and class in its `__all__`, has a docstring."""
    missing = undocumented(source, public_names(source) or [])
    if source.text.strip() and not ast.get_docstring(source.tree):
        missing.append("1: the file itself")
    return missing
