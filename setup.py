from pathlib import Path

from setuptools import find_packages, setup

setup(
    name="ringspan",
    version="0.1.0",
    description="Train and run language models whose context is a whole code base or a shelf of papers.",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["workers", "workers.*", "cluster", "cluster.*", "pipelines", "pipelines.*"]),
    package_data={"pipelines": ["presets/**/*.yaml"]},
    install_requires=[
        "ray[default,data,train]>=2.60,<2.64",  # 2.64 takes back how an actor pool is told its limits
        "torch>=2.13,<3",
        "pyarrow>=17,<26",  # mlflow refuses 26
        "mlflow>=3.17,<4",
        "click>=8.1",
        "pydantic>=2.7",  # the configuration tree, with errors that name the key
        "PyYAML>=6",
        "rich>=13",  # progress bars and tables
        "tokenizers>=0.20",  # byte-pair encoding and tokenizer.json files
        "pathspec>=0.12",  # .gitignore rules as git applies them
        "pypdfium2>=5",  # papers in PDF: Chromium's reader, one wheel without a system library
        "lxml>=5",  # papers in JATS and TEI, with entities, DTDs and the network off
        "markdown-it-py>=3",  # papers in Markdown; rich brings it, too
        "safetensors>=0.4",
        "gguf>=0.17",  # llama.cpp's files: their quantized blocks as numbers
        "numpy>=1.26",
        "matplotlib>=3.8",
        "psutil>=5.9",  # memory of the host; mlflow's system metrics raise without it
    ],
    extras_require={
        "gpu": ["flash-attn>=2.7"],
        "test": [
            "pytest>=8",
            "pytest-timeout>=2.3",
            "hypothesis>=6.100",
            "import-linter>=2.0",
            "ruff>=0.14",  # the form of the code; constraints.txt pins it, because forms differ by version
            "transformers>=5,<6",
            "reportlab>=4",
            "moto[s3]>=5",  # an S3 server, to test object stores
            "flask>=3",  # which it serves with
            "flask-cors>=5",
            "tiktoken>=0.9",  # the reference for its rank files
        ],
    },
    entry_points={"console_scripts": ["ringspan=pipelines.cli:main"]},
)
