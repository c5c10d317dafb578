"""The `kvloom` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn, get_args

from kvloom.core.errors import ConfigError
from kvloom.core.spec import Policy

USAGE_ERROR = 2

SERVE = """\
Serve several models from one KV pool behind an OpenAI API.

With neither CONFIG nor --model it serves the demo fleet: three tiny models that came with kvloom.
Flags override what CONFIG says."""

EXAMPLES = """\
examples:
  kvloom serve
  kvloom serve --model chat=Qwen/Qwen3-0.6B --model code=/models/coder --kv-memory 2GiB
  kvloom serve fleet.yaml --port 9000

CONFIG.yaml, with the defaults:
  host: 127.0.0.1
  port: 8000
  kv_memory: auto        # the pool; `512MiB`, `2GB`, or a third of the free memory
  block_bytes: 16KiB     # a power of two
  policy: adbs           # or fcfs, round-robin
  max_running: 256       # sequences a model decodes together
  max_waiting: 1024      # requests that may queue for a model
  chunk_tokens: 512      # prompt tokens a prefill job takes
  threads: auto          # cores to use
  max_body: 8MiB         # of a request
  api_key_file: keys.txt # one key a line; left out, everyone is served
  models:
    chat: Qwen/Qwen3-0.6B
    code: {path: /models/coder, dtype: auto, rate: 1.0, max_context: 4096}"""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_ERROR, f"kvloom: {message} (`{self.prog} --help` shows what is right)\n")


class ShowVersion(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"kvloom {metadata.version('kvloom')}")
        parser.exit()


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="kvloom", description="Many LLMs woven over one KV cache.", allow_abbrev=False)
    parser.add_argument("--version", action=ShowVersion, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    serve = commands.add_parser(
        "serve",
        help="serve models",
        description=SERVE,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    serve.add_argument("config", nargs="?", type=Path, metavar="CONFIG.yaml", help="see below")
    serve.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="NAME=PATH_OR_HUB_ID",
        help="a model to serve, and the name to serve it under; may be given again",
    )
    serve.add_argument("--host", metavar="H", help="address to listen at (127.0.0.1)")
    serve.add_argument("--port", type=int, metavar="P", help="port to listen at (8000); 0 takes a free one")
    serve.add_argument("--kv-memory", metavar="SIZE", help="the KV pool's size, as 512MiB or 2GB (auto)")
    serve.add_argument("--policy", metavar="P", help=f"{', '.join(get_args(Policy))} (adbs)")
    serve.add_argument("--api-key-file", metavar="F", help="serve only who knows one of its keys, one a line")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    options, unknown = make_parser().parse_known_args(argv)
    if unknown:
        Parser(prog=f"kvloom {options.command}").error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        return serve(options)
    except ConfigError as error:
        print(f"kvloom: {error.message}", file=sys.stderr)
        return USAGE_ERROR


def serve(options: argparse.Namespace) -> int:
    from kvloom.config_file import load_config  # noqa: PLC0415  (--help and --version need none of it)
    from kvloom.machine import Machine  # noqa: PLC0415
    from kvloom.serve.supervisor import serve_fleet  # noqa: PLC0415

    flags: dict[str, Any] = {
        key: value
        for key in ("host", "port", "kv_memory", "policy")
        if (value := getattr(options, key)) is not None
    }
    if options.api_key_file is not None:
        flags["api_key_file"] = Path(options.api_key_file).expanduser().absolute()
    config = load_config(options.config, flags, parse_models(options.model), Machine.here())
    return serve_fleet(config)


def parse_models(texts: Sequence[str]) -> dict[str, str]:
    """NAME=PATH_OR_HUB_ID, each name once. Raises ConfigError."""
    models: dict[str, str] = {}
    for text in texts:
        name, equals, path = text.partition("=")
        if not (name and equals and path):
            raise ConfigError(f"--model {text}: NAME=PATH_OR_HUB_ID is right, as `chat=Qwen/Qwen3-0.6B`")
        if name in models:
            raise ConfigError(f"--model {name}: given twice; each model needs a name of its own")
        models[name] = path
    return models


if __name__ == "__main__":
    sys.exit(main())
