"""What the package shows: its names, its import directions, and that importing it is cheap."""

import ast
import subprocess
import sys
from pathlib import Path

import fedbat

SOURCE = Path(fedbat.__file__).parent

# Each module may import from the layers before its own, never from later ones.
LAYERS = [
    {"errors", "figures", "gaussian", "packing", "provenance", "streams", "units"},
    {"binarize", "layout", "link", "seeds", "settings", "storage", "transfer"},
    {"lock", "parts", "rotation"},
    {"channels", "levels"},
    {"seeded_parts"},
    {"wire", "method"},
    {"contract"},
    {"following"},
    {"downlink"},
    {"loops", "methods"},
    {"onepass"},
    {"training"},
    {"averaging", "server"},
    {"data", "models"},
    {"experiment"},
    {"engine"},
    {"memories"},
    {"simulation"},
    {"checkpoint", "records", "view"},
    {"run", "tracking"},
    {"plots"},
    {"reproduce"},
    {"report"},
    {"cli", "flower"},
    {"__main__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def test_all_is_sorted_and_complete():
    assert len(set(fedbat.__all__)) == len(fedbat.__all__)
    assert fedbat.__all__ == sorted(fedbat.__all__, key=lambda n: (not n.isupper(), n.islower(), n))
    assert all(hasattr(fedbat, name) for name in fedbat.__all__)


def test_every_method_is_there_by_its_own_name():
    assert {kind.__name__ for kind in fedbat.METHODS.values()} <= set(fedbat.__all__)


def test_imports_point_one_way():
    for path in SOURCE.rglob("*.py"):
        module = path.relative_to(SOURCE).with_suffix("").parts[0]
        if module == "__init__":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedbat"):
                parts = node.module.split(".")
                targets = [parts[1]] if len(parts) > 1 else [alias.name for alias in node.names]
                for target in targets:
                    assert LEVEL[target] < LEVEL[module] or target == module, f"{path.name} imports {target}"


def test_import_is_lean():
    """No plotting, no command line, no downloads, no Flower, and no CUDA context."""
    code = (
        "import sys, fedbat, fedbat.simulation, fedbat.data, torch;"
        "heavy = {'matplotlib', 'numba', 'typer', 'pooch', 'scipy', 'flwr', 'requests'} & set(sys.modules);"
        "assert not heavy, heavy; assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_no_file_outgrows_one_sitting():
    long = {str(p): n for p in SOURCE.rglob("*.py") if (n := len(p.read_text().splitlines())) > 400}
    assert not long
