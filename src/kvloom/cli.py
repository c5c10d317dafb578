"""The `kvloom` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, get_args

from kvloom.bench import command as bench_command
from kvloom.bench import workload_command
from kvloom.core.errors import ConfigError
from kvloom.core.spec import Policy

SERVER_ERROR, USAGE_ERROR = 1, 2
DEFAULT_URL = "http://127.0.0.1:8000"

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
  transport: shm         # or nixl: how engines exchange K and V
  lease: 30s             # how long an engine keeps room for K and V that do not come
  program: data_parallel # who computes what; or {name: balanced, ratio: 0.2}, or my_module:my_program
  max_body: 8MiB         # of a request
  api_key_file: keys.txt # one key a line; left out, everyone is served
  models:
    chat: Qwen/Qwen3-0.6B
    code: {path: /models/coder, dtype: auto, rate: 1.0, max_context: 4096}
  units:                 # left out, one engine has all models
    - {models: [chat, code], replicas: 2}
    - {models: [chat], kv_memory: 1GiB, threads: 2, policy: fcfs}

kv_memory and threads are the whole fleet's; engines whose unit names none share what is left of them."""

PROGRAM = """\
Show or change the router program of a fleet that serves. Requests in flight end under the program they began
with; no engine starts again."""


Commands: TypeAlias = "argparse._SubParsersAction[Parser]"


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
    _add_serve(commands)
    _add_program(commands)
    workload_command.add(commands)
    bench_command.add(commands)
    return parser


def _add_serve(commands: Commands) -> None:
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
    serve.set_defaults(run=run_serve)


def _add_program(commands: Commands) -> None:
    program = commands.add_parser(
        "program", help="show or change the router program", description=PROGRAM, allow_abbrev=False
    )
    actions = program.add_subparsers(dest="action", metavar="ACTION", required=True)
    change = actions.add_parser("set", help="change it", description=PROGRAM, allow_abbrev=False)
    change.add_argument("name", metavar="NAME", help="a program that comes with kvloom, or module:function")
    change.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option of the program, as ratio=0.2; may be given again",
    )
    show = actions.add_parser("show", help="show it", description=PROGRAM, allow_abbrev=False)
    for action in (change, show):
        action.add_argument("--url", default=DEFAULT_URL, help=f"of the server ({DEFAULT_URL})")
        action.add_argument(
            "--api-key-file", type=Path, metavar="F", help="the server's API keys, one a line"
        )
        action.set_defaults(run=run_program)


def main(argv: Sequence[str] | None = None) -> int:
    options, unknown = make_parser().parse_known_args(argv)
    if unknown:
        Parser(prog=f"kvloom {options.command}").error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        run: Callable[[argparse.Namespace], int] = options.run
        return run(options)
    except ConfigError as error:
        print(f"kvloom: {error.message}", file=sys.stderr)
        return USAGE_ERROR


def run_serve(options: argparse.Namespace) -> int:
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


def run_program(options: argparse.Namespace) -> int:
    from kvloom import admin  # noqa: PLC0415

    try:
        gateway = admin.Gateway(options.url, options.api_key_file)
        if options.action == "show":
            found = gateway.program()
        else:
            found = gateway.set_program(admin.read_options(options.name, options.option))
    except admin.ServerError as error:
        print(f"kvloom: {error}", file=sys.stderr)
        return SERVER_ERROR
    print(admin.show(found))
    return 0


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
