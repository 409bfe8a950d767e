"""Running a trained model on one rank: its cache and generation."""
