"""Training on one rank: ``loop`` reads as the algorithm, its parts stand beside it."""
