"""Running a trained model on one rank: `cache` and `generate`; `process` and `fade` for documents longer than any context."""
