"""The examples' modules are imported as the examples import them: from their folder."""

import pathlib
import sys

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
