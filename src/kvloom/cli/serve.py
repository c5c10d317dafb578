"""`kvloom serve`: several models from one KV pool, behind an OpenAI API."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, get_args

from cyclopts import App, Parameter

from kvloom.cli.app import INVALID, CommandFailed, Models, Whole
from kvloom.cli.cluster import require_ray
from kvloom.serve.machine import raise_open_files
from kvloom.serve.processes.prefork import LaunchedForkServer, launched
from kvloom.types.errors import ConfigError
from kvloom.types.spec import DEFAULT_POLICY, Policy

if TYPE_CHECKING:
    from kvloom.config.file import Settings
    from kvloom.serve.supervisor import Outcome

EXAMPLES: Final = """\
examples:
  kvloom serve
  kvloom serve Qwen/Qwen3-0.6B
  kvloom serve --model chat=Qwen/Qwen3-0.6B --model code=/models/coder
  kvloom serve fleet.yaml --port 9000

CONFIG.yaml, with the defaults, or an example if there is none:
  host: 127.0.0.1
  port: 8000
  kv_memory: auto        # the pool: `512MiB`, `2GB`, or a third of free memory
  memory: 8GiB           # instead of kv_memory: for weights and pool together
  sleep_dir: /var/tmp    # where weights that sleep lie, on a disk
  block_bytes: 16KiB     # a power of two
  policy: slack          # or another one: see --policy
  max_running: 256       # sequences a model decodes together
  max_waiting: 1024      # requests that may queue for a model
  chunk_tokens: 512      # prompt tokens a prefill job takes; 2048 on GPUs
  threads: auto          # cores to use
  device: cpu            # or cuda, auto: no GPU has run it yet
  transport: auto        # or shm, nixl, tcp: how engines exchange K and V
  transport_host: 127.0.0.1 # where engines listen for K and V by tcp
  lease: 30s             # how long room is kept for K and V that do not come
  drain: 60s             # how long requests may end before their unit restarts
  patience: 120s         # how long a request waits for a unit that restarts
  watchdog: 30s          # how long a process may hang before it is replaced
  priorities: {-1: 4000} # headroom in tokens, by urgency; none by default
  rescheduling: {period: 0.5, out: 24, into: 48} # moves between units; or none
  load_timeout: 1800s    # how long a unit may load its models
  node_lease: 30s        # how long a cluster's node serves when it is cut off
  node_tls: {certificate: fleet.pem, key: fleet.key} # between nodes; made by default
  gateways: [10.0.0.1, 10.0.0.2] # a cluster's nodes with one each; here by default
  program: data_parallel # or {name: balanced, ratio: 0.2}, or my_module:my_own
  max_body: 8MiB         # of a request
  max_connections: 4096  # that one address, which is no proxy's, may have open
  request_timeout: none  # how long a request may take
  tls: {certificate: cert.pem, key: key.pem} # https; none by default
  proxies: [10.0.0.0/8]  # whose X-Forwarded-For counts; none by default
  allow_origins: [https://chat.example.org] # pages that may ask; none by default
  api_key_file: keys.txt # one key a line, or KEY priority=-1; none: for all
  admin_key_file: own.txt # of those who may administer the fleet
  keys: keys.yaml        # keys with names and limits: see `kvloom key --help`
  share_prefixes: auto   # or all, key: who finds whose prompts cached
  audit_file: audit.jsonl # what administrators did; left out, the log has it
  journal: journal.jsonl # what happens to the fleet, and why; also at /admin/events
  traffic: traffic.jsonl # counts and lengths by model and hour, to plan by
  otlp: http://127.0.0.1:4318  # traces go there (OpenTelemetry)
  access_log: false      # a line for each request, without its content
  log_level: info        # or warning, error
  log_format: text       # or json: each line is an object
  cache_dir: /var/cache/kvloom # prefixes that give way, also for later; none by default
  cache_size: 10GiB      # of its files
  models:
    chat: Qwen/Qwen3-0.6B
    code: {path: /models/coder, rate: 1.0, slo: {ttft: 2s, tpot: 200ms}}
  units:                 # left out, one engine has all models
    - {models: [chat, code], replicas: 2}
    - {models: [chat], kv_memory: 1GiB, threads: 2, policy: fcfs}
  weave:                 # who lends blocks and attention to whom; default none
    - {hot: unit-2, cold: unit-0, share: 0.45, part: 0.3}

kv_memory and threads are the whole fleet's; engines whose unit names none share
what is left of them."""

app = App(name="serve", help_epilogue=EXAMPLES)


@app.default
def serve(
    what: Annotated[
        Path | None, Parameter(help="a config, see below; or a model: a folder, a GGUF file or a hub id")
    ] = None,
    /,
    *,
    model: Models = (),
    host: Annotated[str | None, Parameter(help="the address to listen at (127.0.0.1)")] = None,
    port: Annotated[Whole | None, Parameter(help="the port to listen at (8000); 0 takes a free one")] = None,
    kv_memory: Annotated[
        str | None, Parameter(metavar="SIZE", help="the KV pool's size, as 512MiB or 2GB (auto)")
    ] = None,
    memory: Annotated[
        str | None,
        Parameter(metavar="SIZE", help="for weights and pool together: models that do not fit sleep"),
    ] = None,
    policy: Annotated[str | None, Parameter(help=f"{', '.join(get_args(Policy))} ({DEFAULT_POLICY})")] = None,
    api_key_file: Annotated[
        Path | None, Parameter(help="serve only who knows one of its keys, one a line")
    ] = None,
    admin_key_file: Annotated[
        Path | None, Parameter(help="the keys of those who may administer, one a line")
    ] = None,
    journal: Annotated[
        Path | None, Parameter(help="write what happens to the fleet, and why, to this file")
    ] = None,
    otlp: Annotated[
        str | None, Parameter(metavar="URL", help="send traces to this OpenTelemetry collector")
    ] = None,
    access_log: Annotated[
        bool | None, Parameter(negative=(), help="show a line for each request, without its content")
    ] = None,
    log_level: Annotated[str | None, Parameter(help="info, warning, error (info)")] = None,
    log_format: Annotated[str | None, Parameter(help="text, json: an object for each line (text)")] = None,
    cluster: Annotated[
        str | None,
        Parameter(metavar="auto|HOST:PORT", help="the Ray cluster on whose hosts it runs (this host)"),
    ] = None,
) -> None:
    """Serve several models from one KV pool behind an OpenAI API.

    With neither WHAT nor --model it serves the demo fleet: three tiny models that came with kvloom. Flags
    override what a config says. A model as WHAT is named by its hub id, or as its folder or file is."""
    given = {"host": host, "port": port, "kv_memory": kv_memory, "memory": memory, "policy": policy}
    given |= {"otlp": otlp, "access_log": access_log, "log_level": log_level, "log_format": log_format}
    flags: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    for key, file in (
        ("api_key_file", api_key_file),
        ("admin_key_file", admin_key_file),
        ("journal", journal),
    ):
        if file is not None:
            flags[key] = str(file.expanduser().absolute())
    raise_open_files()  # before the first process starts, for all of them
    if cluster is not None:
        require_ray()
    with ExitStack() as stack:
        forks = None if cluster is not None else stack.enter_context(launched())
        # imported while that process imports torch
        from kvloom.config.file import model_named, parse_models, read_settings  # noqa: PLC0415

        named = {} if what is None else model_named(what)
        config = None if named else what
        settings = read_settings(config, flags, named | parse_models(model))
        try:
            outcome = _served(settings, forks, cluster)
        except ConfigError as error:
            key = error.message.partition(":")[0]
            if config is None or key in flags or key not in ("host", "port"):
                raise
            raise ConfigError(f"{config}: {error.message}") from error
    if outcome.code == INVALID:
        raise ConfigError(outcome.why)
    if outcome.code:
        raise CommandFailed(outcome.why, outcome.code)


def _served(settings: Settings, forks: LaunchedForkServer | None, cluster: str | None) -> Outcome:
    """Serves on this host, or on the hosts of a cluster, and returns how that ended. Raises ConfigError."""
    if cluster is not None:
        from kvloom.serve.nodes.view import serve_over  # noqa: PLC0415 -- the only place that needs Ray

        return serve_over(cluster, settings)
    from kvloom.config.machine import Machine  # noqa: PLC0415
    from kvloom.serve.supervisor import serve_fleet  # noqa: PLC0415

    return serve_fleet(settings.config(Machine.here()), forks)
