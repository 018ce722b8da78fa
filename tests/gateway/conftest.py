from __future__ import annotations

import sys
from pathlib import Path

# Test modules are imported by path (importmode=importlib); the helpers beside them need this.
sys.path.insert(0, str(Path(__file__).parent))
