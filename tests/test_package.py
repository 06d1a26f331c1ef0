"""The package: what it exports, what importing it costs and needs."""

from __future__ import annotations

import subprocess
import sys

import torchmoe


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_every_public_name_exists() -> None:
    for name in torchmoe.__all__:
        assert getattr(torchmoe, name) is not None


def test_the_core_imports_with_torch_alone() -> None:
    """Everything outside titan, testing's strategies and the optional extras works without the extras' packages."""
    out = python(
        "import sys\n"
        "class Block:\n"
        "    names = {'torchtitan', 'liger_kernel', 'mip', 'triton', 'matplotlib', 'hypothesis', 'rich', 'tyro'}\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in self.names: raise ModuleNotFoundError('blocked ' + name, name=name)\n"
        "import torch\n"
        "for m in list(sys.modules):\n"
        "    if m.split('.')[0] in Block.names: del sys.modules[m]\n"
        "sys.meta_path.insert(0, Block())\n"
        "import torchmoe\n"
        "print([getattr(torchmoe, n) for n in torchmoe.__all__] is not None)\n"
    )
    assert out == "True"


def test_importing_pulls_in_nothing_but_torch() -> None:
    out = python("import torch, sys; before = set(sys.modules); import torchmoe; print(sorted(set(sys.modules) - before))")
    assert out == "['torchmoe']"
