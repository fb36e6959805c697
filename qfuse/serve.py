"""Serve: mlx_lm.server with every model that it loads fused."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from http.server import ThreadingHTTPServer
from typing import Any, NoReturn
from unittest.mock import patch

import mlx.core as mx
from mlx_lm import server

from .fuse import Fusion, FusionReport, fuse
from .load import DEFAULT, check, locate, opening


def arguments(given: Sequence[str]) -> Namespace:
    """What mlx_lm.server makes of its command line. Raises ValueError on what it does not take."""
    taken: list[Namespace] = []

    def refuse(_: ArgumentParser, message: str) -> NoReturn:
        raise ValueError(f"[serve] wants what mlx_lm.server takes, got {message}")

    # Its parser is a local of main(), which hands what it read to run().
    with (
        patch.object(server, "run", lambda _host, _port, provider: taken.append(provider.cli_args)),
        patch.object(ArgumentParser, "error", refuse),
        patch("sys.argv", ["mlx_lm.server", *given]),
    ):
        server.main()
    (args,) = taken
    if not 0 <= args.port < 1 << 16:
        raise ValueError(f"[serve.port] wants 0 to 65535, got {args.port}")
    return args


class FusedProvider(server.ModelProvider):  # type: ignore[misc]
    """mlx_lm.server's models, each fused when it is loaded and as it was when it is let go.

    args: as of :func:`arguments`; without a model it serves the package's own, in f32. options: of fuse().
    on_report: called with a report when a model is fused, and when it is let go, then with its calls.
    """

    def __init__(
        self,
        args: Namespace,
        options: Mapping[str, Any],
        on_report: Callable[[FusionReport], None] = lambda _: None,
    ) -> None:
        self._own = args.model is None
        args.model = str(DEFAULT) if self._own else args.model
        self._options = dict(options)
        self._on_report = on_report
        self.fusion: Fusion | None = None
        super().__init__(args)

    def reset(self) -> None:
        """Let the model go."""
        if self.fusion is not None:
            self._on_report(self.fusion.report())
            self.fusion.remove()
            self.fusion = None
        super().reset()

    def _load(self, model_path: str, adapter_path: str | None = None, draft_model_path: str | None = None) -> None:
        folder = locate(model_path)
        check(folder)
        with opening(folder):
            super()._load(model_path, adapter_path, draft_model_path)
        try:
            if self._own and model_path == str(DEFAULT):
                self.model.set_dtype(mx.float32)
                mx.eval(self.model.parameters())  # the server's thread cannot: MLX's streams are each a thread's own
            self.fusion = fuse(self.model, **self._options)
        except BaseException:
            super().reset()  # a model half ready would be taken for a loaded one
            raise
        self._on_report(self.fusion.report())


class Generator(server.ResponseGenerator):  # type: ignore[misc]
    """mlx_lm.server's generation thread, which ends with its streams: workers of theirs would abort the process."""

    def _run_generate(self) -> None:
        super()._run_generate()
        mx.clear_streams()


def serve(
    provider: server.ModelProvider,
    on_listening: Callable[[str, ThreadingHTTPServer], None] = lambda _url, _httpd: None,
) -> None:
    """Serve until interrupted, or until the HTTP server is shut down.

    on_listening: called with the URL, in which a port of 0 has become a free one, and the HTTP server.
    Raises OSError on an address that cannot be had.
    """

    class Server(ThreadingHTTPServer):
        def server_activate(self) -> None:
            super().server_activate()
            host, port = str(self.server_address[0]), self.server_address[1]
            on_listening(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}", self)

    args = provider.cli_args
    generator = Generator(provider, server.LRUPromptCache(args.prompt_cache_size))
    try:
        if mx.distributed.init().rank() == 0:
            server._run_http_server(args.host, args.port, generator, server_class=Server)
        else:
            generator.join()
    finally:
        generator.stop_and_join()  # mlx_lm.server.run leaves the thread behind where the address is taken
