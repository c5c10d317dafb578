"""The `kvloom` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, get_args

from kvloom.admin import command as admin_command
from kvloom.bench import command as bench_command
from kvloom.bench import simulate_command, workload_command
from kvloom.lab.faults import command as chaos_command
from kvloom.planning import command as plan_command
from kvloom.profiling import command as profile_command
from kvloom.reproduce import command as reproduce_command
from kvloom.types.errors import ConfigError
from kvloom.types.spec import Policy

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
  policy: adbs           # or fcfs, round-robin, partitioned
  max_running: 256       # sequences a model decodes together
  max_waiting: 1024      # requests that may queue for a model
  chunk_tokens: 512      # prompt tokens a prefill job takes
  threads: auto          # cores to use
  device: cpu            # or cuda, auto: no GPU has run it yet
  transport: shm         # or nixl: how engines exchange K and V
  lease: 30s             # how long an engine keeps room for K and V that do not come
  drain: 60s             # how long requests at a unit that is to restart are waited for
  patience: 120s         # how long a request waits for the only unit of its model to restart
  priorities: {-1: 4000} # tokens of headroom for requests so urgent, or more; none by default
  rescheduling: {period: 0.5, out: 24, into: 48} # moves between units; or none
  program: data_parallel # who computes what; or {name: balanced, ratio: 0.2}, or my_module:my_program
  max_body: 8MiB         # of a request
  api_key_file: keys.txt # one key a line, or KEY priority=-1; left out, everyone is served
  admin_key_file: own.txt # of those who may administer the fleet
  models:
    chat: Qwen/Qwen3-0.6B
    code: {path: /models/coder, dtype: auto, rate: 1.0, max_context: 4096}
  units:                 # left out, one engine has all models
    - {models: [chat, code], replicas: 2}
    - {models: [chat], kv_memory: 1GiB, threads: 2, policy: fcfs}
  weave:                 # who lends blocks and attention to whom; nobody by default
    - {hot: unit-2, cold: unit-0, share: 0.45, part: 0.3}

kv_memory and threads are the whole fleet's; engines whose unit names none share what is left of them."""

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
    admin_command.add(commands)
    workload_command.add(commands)
    bench_command.add(commands)
    simulate_command.add(commands)
    profile_command.add(commands)
    plan_command.add(commands)
    reproduce_command.add(commands)
    chaos_command.add(commands)
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
    serve.add_argument("--admin-key-file", metavar="F", help="keys of those who may administer, one a line")
    serve.set_defaults(run=run_serve)


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
    # --help and --version need none of it
    from kvloom.config_file import load_config, parse_models  # noqa: PLC0415
    from kvloom.machine import Machine  # noqa: PLC0415
    from kvloom.serve.command import serve_fleet  # noqa: PLC0415

    flags: dict[str, Any] = {
        key: value
        for key in ("host", "port", "kv_memory", "policy")
        if (value := getattr(options, key)) is not None
    }
    for key in ("api_key_file", "admin_key_file"):
        if (file := getattr(options, key)) is not None:
            flags[key] = Path(file).expanduser().absolute()
    config = load_config(options.config, flags, parse_models(options.model), Machine.here())
    return serve_fleet(config)


if __name__ == "__main__":
    from kvloom.entry import main as enter

    sys.exit(enter())
