"""The one home of formulas: FLOPs, bytes saved, bytes moved, memory. Pure Python, no tensor is touched."""
