"""``python -m rollstream.inference.server``: vLLM's API server with our routes, announced when it serves.

Takes vLLM's own arguments plus ``--announce FILE`` and ``--label LABEL`` (of the weights in the model directory).
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import Any

from rollstream.inference.announce import announce
from rollstream.inference.plugin import OWNER_VARIABLE

ADMIN_TOKEN_VARIABLE = "ROLLSTREAM_ENGINE_ADMIN_TOKEN"


def _own_arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--announce", type=Path, required=True)
    parser.add_argument("--label", default="base")
    return parser.parse_known_args(argv)


async def _serve(args: argparse.Namespace, own: argparse.Namespace) -> None:
    """Start the engine, serve until SIGTERM, stop the engine. As vLLM's run_server, with our engine and routes."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.launcher import serve_http, setup_server
    from vllm.usage.usage_lib import UsageContext

    from rollstream.inference.routes import Routes, Served
    from rollstream.inference.versioned import Load, VersionedEngine, load_recorder

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # until vLLM installs its own handler
    _, sock = setup_server(args, reuse_port=False)
    load = Load()
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config(UsageContext.OPENAI_API_SERVER)
    engine = VersionedEngine.from_vllm_config(
        config,
        usage_context=UsageContext.OPENAI_API_SERVER,
        stat_loggers=[load_recorder(load)],
        disable_log_stats=args.disable_log_stats,
    )
    assert isinstance(engine, VersionedEngine)  # vLLM's annotation forgets the subclass
    try:
        engine.serve_version(own.label)
        await engine.update_weight_version(own.label)
        await engine.reset_mm_cache()
        tasks = await engine.get_supported_tasks()
        args.middleware.append(f"{Routes.__module__}.{Routes.__qualname__}")
        app = build_app(args, tasks, engine.model_config)
        await init_app_state(engine, app.state, args, tasks)
        app.state.rollstream = Served(
            engine, args.served_model_name or [args.model], load, os.environ[ADMIN_TOKEN_VARIABLE]
        )
        host, port = sock.getsockname()[:2]
        announce(own.announce, f"http://{args.host or host}:{port}")
        stopped = await serve_http(
            app, sock=sock, host=args.host, port=port, log_level="warning", access_log=False, http="httptools"
        )
    finally:
        engine.shutdown(timeout=config.shutdown_timeout)
        sock.close()
    await stopped


def main(argv: list[str] | None = None) -> None:
    """Parse and serve."""
    own, rest = _own_arguments(sys.argv[1:] if argv is None else argv)
    os.environ[OWNER_VARIABLE] = str(os.getpid())
    if ADMIN_TOKEN_VARIABLE not in os.environ:
        sys.exit(f"{ADMIN_TOKEN_VARIABLE} is not set: the engine is started by rollstream-inference, not by hand")
    import uvloop
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.logger import configure_logging_from_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()  # type: ignore[no-untyped-call]
    parser = FlexibleArgumentParser(description="vLLM with rollstream's routes")  # type: ignore[no-untyped-call]
    args: Any = make_arg_parser(parser).parse_args(rest)
    configure_logging_from_args(args)
    validate_parsed_serve_args(args)
    uvloop.run(_serve(args, own))


if __name__ == "__main__":
    main()
