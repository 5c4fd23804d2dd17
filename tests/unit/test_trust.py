"""No code from outside is executed: a check of all sources' syntax trees."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(file for folder in ("services", "trainer", "deploy") for file in (ROOT / folder).rglob("*.py"))
UNPICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
RESTRICTED = {"trainer/dvp_trainer/learn/state.py": ["imports pickle"]}
"""Allowed offences. This one restricts what PyTorch unpickles: tests/unit/trainer/test_checkpoint.py."""
RUNNERS = {"eval", "exec", "compile", "__import__"}


def offences(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            yield from (f"imports {name}" for name in names if name.partition(".")[0] in UNPICKLERS)
        if isinstance(node, ast.Call):
            yield from _call_offences(node)


def _call_offences(call: ast.Call) -> Iterator[str]:
    name = ast.unparse(call.func)
    options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    if name in RUNNERS or name in ("os.system", "os.popen", "yaml.load"):
        yield f"calls {name}"
    if options.get("shell", "False") != "False":
        yield f"{name} through a shell"
    if options.get("trust_remote_code", "False") != "False":
        yield f"{name} trusts remote code"
    if re.fullmatch(r"Auto\w+\.from_pretrained", name) and "trust_remote_code" not in options:
        yield f"{name} does not say trust_remote_code=False"
    if (
        re.fullmatch(r"(AutoModel\w*|type\(model\))\.from_pretrained", name)
        and options.get("use_safetensors") != "True"
    ):
        yield f"{name} without use_safetensors=True"
    if name == "torch.load" and options.get("weights_only") != "True":
        yield "torch.load without weights_only=True"
    if options.get("allow_pickle", "False") != "False":
        yield f"{name} allows pickles"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_nothing_is_unpickled_or_run(file: Path) -> None:
    assert list(offences(ast.parse(file.read_text()))) == RESTRICTED.get(str(file.relative_to(ROOT)), [])


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from dill import loads",
        "eval('1')",
        "os.system('ls')",
        "subprocess.run('ls', shell=True)",
        "AutoTokenizer.from_pretrained(f, trust_remote_code=True)",
        "AutoConfig.from_pretrained(f)",
        "AutoModelForCausalLM.from_pretrained(f, trust_remote_code=False)",
        "torch.load(f)",
        "numpy.load(f, allow_pickle=True)",
    ],
)
def test_the_search_finds(text: str) -> None:
    assert list(offences(ast.parse(text)))
