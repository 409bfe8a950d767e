"""The commands of `ringspan`, by what they work on; `pipelines.cli` puts them together."""
