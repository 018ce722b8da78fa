from __future__ import annotations

import sys
from pathlib import Path

# The fake model and the harness are plain modules beside the tests.
sys.path.insert(0, str(Path(__file__).parent))
