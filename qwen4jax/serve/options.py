"""The command line of the server, checked before anything heavy is imported."""

import argparse
import dataclasses
import ipaddress
import os
from pathlib import Path
from typing import Literal

# the small trained checkpoint of a checkout of the sources
EMBEDDED = Path(__file__).parents[2] / "checkpoints" / "tiny"


class OptionsError(ValueError):
    """An option cannot be followed; the message begins with its name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What the server is told; the attributes are the command line's flags, where help says more.

    Attributes:
        model: directory of the checkpoint.
        dtype: of plain tensors; None as stored.
        table: where the n-gram table lies: `device`, `pinned` or `host`.
        kv_dtype: of cached keys and values; None is the model's.
        draft: draft tokens per round; None is 3, and 0 without a draft head.
        draft_weights: form that the draft head is quantised to; None as stored.
        draft_vocab: ids that drafts are chosen among, the lowest; None is all.
        index_share: how draft steps select tokens; None as the model says.
        max_slots: requests that run together.
        max_context: most tokens of prompt and output together; None is the model's, at most 8192.
        queue: requests that wait for a slot.
        chunk: most prompt tokens of one prefill step.
        top_logprobs: most alternatives per token that a call may ask for.
        seed: from which seeds are drawn for calls without one; None is by chance.
        host: address to listen on.
        port: 0 is any free one.
        metrics_port: of Prometheus metrics; None is off, 0 any free one.
        max_message_mb: largest message of a client.
        ping_interval: seconds between a client's pings below which they are abuse.
        reflection: whether clients may ask for the protocol.
        tls_cert: PEM file of the certificate chain.
        tls_key: PEM file of its private key.
        tls_client_ca: PEM file of authorities; clients must show a certificate of theirs.
        token_file: file of accepted tokens, one a line.
        allow_insecure: whether an address that is not loopback may go without TLS.
        grace: seconds that running requests get when the server is told to stop.
        watchdog: seconds without a round after which health turns red.
        compilation_cache: folder of compiled programs; None keeps none.
        log_level: of the lines to write.
        log_format: `text` or `json`; None is text on a terminal.
        test_faults: whether calls may ask for faults by metadata; for the tests of this package.
    """

    model: Path
    dtype: str | None = None
    table: Literal["device", "pinned", "host"] = "device"
    kv_dtype: str | None = None
    draft: int | None = None
    draft_weights: Literal["fp8", "nvfp4"] | None = None
    draft_vocab: int | None = None
    index_share: str | None = None
    max_slots: int = 8
    max_context: int | None = None
    queue: int = 64
    chunk: int = 256
    top_logprobs: int = 5
    seed: int | None = None
    host: str = "127.0.0.1"
    port: int = 50051
    metrics_port: int | None = None
    max_message_mb: float = 4.0
    ping_interval: float = 10.0
    reflection: bool = True
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    token_file: Path | None = None
    allow_insecure: bool = False
    grace: float = 30.0
    watchdog: float = 120.0
    compilation_cache: Path | None = None
    log_level: str = "info"
    log_format: str | None = None
    test_faults: bool = False

    @property
    def secure(self) -> bool:
        """Whether the connection is encrypted."""
        return self.tls_cert is not None

    def check(self) -> None:
        """Checks the options against each other.

        Raises:
            OptionsError: names the flag.
        """
        if not self.model.is_dir():
            if self.model == EMBEDDED:
                raise OptionsError(
                    f"--model: none is given, and there is no embedded checkpoint at {EMBEDDED} "
                    "(it comes with a checkout of the sources)"
                )
            raise OptionsError(f"--model: {self.model} is no directory")
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                flag = name.replace("_", "-")
                raise OptionsError(f"--{flag}: {value} is not in {low}..{high}")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise OptionsError("--tls-cert and --tls-key: one is given without the other")
        if self.tls_client_ca and not self.secure:
            raise OptionsError("--tls-client-ca: needs --tls-cert and --tls-key")
        for name in ("tls_cert", "tls_key", "tls_client_ca", "token_file"):
            file = getattr(self, name)
            if file is not None and not file.is_file():
                raise OptionsError(f"--{name.replace('_', '-')}: {file} is no file")
        if not (self.secure or self.allow_insecure or _is_loopback(self.host)):
            raise OptionsError(
                f"--host: {self.host} is reachable from elsewhere, and nothing is encrypted; give "
                "--tls-cert and --tls-key, or ask for it with --allow-insecure"
            )


_RANGES = dict(
    draft=(0, 7),
    draft_vocab=(1, 2**31 - 1),
    max_slots=(1, 1024),
    max_context=(2, 2**31 - 1),
    queue=(0, 100_000),
    chunk=(16, 8192),
    top_logprobs=(0, 100),
    seed=(0, 2**64 - 1),
    port=(0, 65535),
    metrics_port=(0, 65535),
    max_message_mb=(0.001, 2000),
    ping_interval=(0.01, 86400),
    grace=(0, 86400),
    watchdog=(0.1, 86400),
)


def parse(argv: list[str] | None = None) -> Options:
    """The options of a command line.

    Raises:
        OptionsError: they contradict each other, or a file is not there. (What is no option at all
            ends the process, as argparse does.)
    """
    values = vars(_parser().parse_args(argv))
    if str(values["compilation_cache"]) == "none":
        values["compilation_cache"] = None
    options = Options(**values)
    options.check()
    return options


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _cache_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "qwen4jax" / "programs"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m qwen4jax.serve",
        description="Serve a qwen4_exp checkpoint over gRPC (qwen4jax.v1.Generation).",
        usage="%(prog)s [--model DIR] [options]",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=30, width=98),
    )
    model = parser.add_argument_group("model")
    add = model.add_argument
    add("--model", metavar="DIR", type=Path, default=EMBEDDED, help="default: the embedded one")
    add("--dtype", choices=("bfloat16", "float32"), help="of plain tensors (as stored)")
    places = ("device", "pinned", "host")
    add("--table", choices=places, default="device", help="of n-grams: where it lies (device)")
    add("--kv-dtype", choices=("bfloat16", "float32", "float8_e4m3fn"), help="of keys and values")
    add("--draft", metavar="N", type=int, help="draft tokens per round, 0 to 7 (3)")
    add("--draft-weights", choices=("fp8", "nvfp4"), help="of the draft head (as stored)")
    add("--draft-vocab", metavar="N", type=int, help="ids that are drafted, the lowest (all)")
    add("--index-share", choices=("fresh", "share", "share_frozen"))
    size = parser.add_argument_group("size")
    add = size.add_argument
    add("--max-slots", metavar="N", type=int, default=8, help="requests that run together (8)")
    add("--max-context", metavar="N", type=int, help="most tokens of prompt and output together")
    add("--queue", metavar="N", type=int, default=64, help="requests that wait for a slot (64)")
    add("--chunk", metavar="N", type=int, default=256, help="prompt tokens of one step (256)")
    add("--top-logprobs", metavar="N", type=int, default=5, help="most that a call may ask for (5)")
    add("--seed", metavar="N", type=int, help="from which the seeds of calls without one are drawn")
    network = parser.add_argument_group("network")
    add = network.add_argument
    add("--host", metavar="ADDRESS", default="127.0.0.1", help="to listen on (127.0.0.1)")
    add("--port", metavar="N", type=int, default=50051, help="0: any free one (50051)")
    add("--metrics-port", metavar="N", type=int, help="of Prometheus metrics, by HTTP (off)")
    add("--max-message-mb", metavar="MB", type=float, default=4.0, help="of a client (4)")
    add("--ping-interval", metavar="S", type=float, default=10.0, help="least, of clients (10)")
    add("--no-reflection", dest="reflection", action="store_false", help="tell no protocol")
    security = parser.add_argument_group("security")
    add = security.add_argument
    add("--tls-cert", metavar="FILE", type=Path, help="PEM: certificate chain")
    add("--tls-key", metavar="FILE", type=Path, help="PEM: its private key")
    add(
        "--tls-client-ca", metavar="FILE", type=Path, help="PEM: authorities of client certificates"
    )
    add("--token-file", metavar="FILE", type=Path, help="accepted bearer tokens, one a line")
    add(
        "--allow-insecure", action="store_true", help="without TLS on other than loopback addresses"
    )
    running = parser.add_argument_group("running")
    add = running.add_argument
    add("--grace", metavar="S", type=float, default=30.0, help="to finish after SIGTERM (30)")
    add("--watchdog", metavar="S", type=float, default=120.0, help="without a round: red (120)")
    add(
        "--compilation-cache",
        metavar="DIR",
        type=Path,
        default=_cache_folder(),
        help="of compiled programs; none: keep none (in the user's cache folder)",
    )
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    add("--log-format", choices=("text", "json"), help="default: text on a terminal")
    add("--test-faults", action="store_true", help=argparse.SUPPRESS)
    return parser
