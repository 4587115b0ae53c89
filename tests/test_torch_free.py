"""What serves on a CPU needs no torch beyond the reference operations: everything else imports while torch is
blocked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import plait
from plait.kernels import native
from tests.adapters import write_adapter
from tests.tiny import tiny_model_dir

pytestmark = pytest.mark.slow

SOURCE = Path(__file__).parents[1] / "src"

# The modules that compute with torch; every other module of the package must import without it.
TORCH = {
    "plait.bench.optimisers",
    "plait.decoding.beam",
    "plait.decoding.filters",
    "plait.decoding.generation",
    "plait.decoding.models",
    "plait.decoding.scoring",
    "plait.engine.reference_executor",
    "plait.memory.attention",
    "plait.memory.base",
    "plait.memory.dense",
    "plait.memory.latent",
    "plait.memory.none",
    "plait.memory.paged",
    "plait.memory.paged_step",
    "plait.model.decoder",
    "plait.model.drafter",
    "plait.model.layers",
    "plait.model.record",
    "plait.ops.adapted",
    "plait.ops.functional",
    "plait.ops.interpreter",
    "plait.ops.reference",
    "plait.ops.trace",
    "plait.training.assemble",
    "plait.training.batch",
    "plait.training.data.batches",
    "plait.training.first_fault",
    "plait.training.flops",
    "plait.training.live",
    "plait.training.loop",
    "plait.training.loss",
    "plait.training.micro",
    "plait.training.continued_documents",
    "plait.training.evaluate",
    "plait.training.expert_counts",
    "plait.training.translations",
    "plait.studies.run_plots",
    "plait.training.mixture",
    "plait.training.optimizers",
    "plait.training.optimizers.adamw",
    "plait.training.optimizers.base",
    "plait.training.optimizers.lion",
    "plait.training.optimizers.mars",
    "plait.training.optimizers.muon",
    "plait.training.optimizers.native",
    "plait.training.optimizers.orthogonal",
    "plait.training.optimizers.pieces",
    "plait.training.optimizers.report",
    "plait.training.optimizers.rules",
    "plait.training.optimizers.settings",
    "plait.training.optimizers.sophia",
    "plait.training.precision",
    "plait.training.roles",
    "plait.training.routing",
    "plait.training.start",
    "plait.training.step",
    "plait.training.validation",
    "plait.verify.compare",
    "plait.verify.reference",
    "plait.verify.report",
    "plait.verify.run",
    "plait.weights.drafter",
    "plait.weights.export",
    "plait.weights.load",
    "plait.weights.packed",
}


def modules() -> list[str]:
    """Every module of the package, by its file; those that run in a peer's environment apart."""
    found = []
    for path in sorted((SOURCE / "plait").rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if not name.endswith("__main__") and ".bench.drivers" not in name:
            found.append(name)
    return found


def _import_blocked(names: list[str]) -> subprocess.CompletedProcess[str]:
    code = "import sys, importlib\nsys.modules['torch'] = None\nfor name in sys.argv[1:]: importlib.import_module(name)"
    return subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True, timeout=120)


def test_everything_but_the_reference_imports_without_torch() -> None:
    free = [name for name in modules() if name not in TORCH]
    assert {"plait.engine.engine", "plait.engine.scheduler", "plait.engine.sampler", "plait.memory.blocks"} <= set(free)
    result = _import_blocked(free)
    assert result.returncode == 0, result.stderr[-2000:]


def test_the_list_of_torch_modules_is_no_longer_than_it_must_be() -> None:
    unknown = TORCH - set(modules())
    assert not unknown


def test_every_listed_module_does_need_torch() -> None:
    """Each is imported in a process of its own, forked from one that has imported nothing yet."""
    code = (
        "import sys, importlib, os\n"
        "sys.modules['torch'] = None\n"
        "for name in sys.argv[1:]:\n"
        "    child = os.fork()\n"
        "    if not child:\n"
        "        try:\n"
        "            importlib.import_module(name)\n"
        "        except ImportError as error:\n"
        "            os._exit(0 if error.name == 'torch' else 2)\n"
        "        os._exit(1)\n"
        "    print(name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *sorted(TORCH)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split("\n")[:-1] == [f"{name} 0" for name in sorted(TORCH)]


@pytest.mark.skipif(native.native_library() is None, reason=f"no native library: {native.reason()}")
def test_generate_from_the_cache_imports_no_torch(tmp_path: Path) -> None:
    directory = tiny_model_dir(tmp_path)
    code = (
        "import json, sys, time\n"
        "from plait.cli.main import main\n"
        "flags = ['-p', 'x', '--max-tokens', '4', '--temperature', '0', '--json', *sys.argv[2:]]\n"
        "status = main(['generate', sys.argv[1], *flags])\n"
        "assert status == 0 and 'torch' not in sys.modules, [name for name in sys.modules if 'torch' in name][:5]\n"
    )
    environment = os.environ | {"PLAIT_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-c", code, str(directory)]
    texts = []
    adapter = write_adapter(tmp_path / "adapter", plait.load(directory, "fp32"))
    for more in ([], [], ["--adapter", str(adapter)]):
        done = subprocess.run([*command, *more], capture_output=True, text=True, timeout=120, env=environment)
        assert done.returncode == 0, done.stderr[-2000:]
        texts.append(json.loads(done.stdout)["token_ids"])
    assert texts[0] == texts[1] != texts[2] and [len(text) for text in texts] == [4, 4, 4]


def test_convert_imports_no_torch(tmp_path: Path) -> None:
    directory = tiny_model_dir(tmp_path, "gpt_neox")
    code = (
        "import sys\n"
        "from plait.cli.main import main\n"
        "for source, target in zip(sys.argv[1:], sys.argv[2:]):\n"
        "    assert main(['convert', source, target]) == 0 and 'torch' not in sys.modules\n"
    )
    targets = [str(tmp_path / name) for name in ("m.gguf", "back", "copy")]
    done = subprocess.run([sys.executable, "-c", code, str(directory), *targets], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    weights = [(Path(path) / "model.safetensors").read_bytes() for path in targets[1:]]
    assert weights[0] == weights[1]
    plait.load(targets[2])


def test_importing_plait_imports_neither_torch_nor_numpy() -> None:
    code = "import sys, plait; assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
