import sys
from pathlib import Path

# The launchers are scripts beside the package, which import each other as scripts do.
sys.path.insert(0, str(Path(__file__).parents[2] / "launch"))
