"""Prometheus metrics of a server, in a registry of their own."""

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    start_http_server,
)

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """What is counted; times are seconds.

    Attributes:
        registry: of all of them.
        requests: calls that have ended, by method and code.
        first_token: from a sample's arrival to its first token.
        inter_token: between tokens of a sample after its first, per token: a burst's tokens share
            the time since the burst before.
        queue_time: from arrival to a slot.
        tokens_per_round: of each sample that ended, its first token aside.
        prompt_tokens: fed for admitted samples and scores.
        generated_tokens: handed out.
        rounds: speculative rounds.
        prefill_steps: prefill steps.
        failed_rounds: rounds that failed with their requests.
        non_finite: samples that ended because their logits were not finite.
        running: samples in a slot.
        waiting: samples and scores that wait.
        compile_seconds: tracing, lowering and compiling in this process.
        compiled_programs: compiled, or read from the cache of compiled programs.
        state_bytes: of the decode state.
        parameter_bytes: of the parameters.
    """

    def __init__(self):
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)

        def named(kind, name, text, **more):
            return kind(f"qwen4jax_{name}", text, registry=self.registry, **more)

        self.requests: Counter = named(
            Counter, "requests", "Calls that have ended", labelnames=("method", "code")
        )
        self.first_token: Histogram = named(
            Histogram,
            "time_to_first_token_seconds",
            "From arrival to the first token",
            buckets=_SECONDS,
        )
        self.inter_token: Histogram = named(
            Histogram,
            "inter_token_seconds",
            "Between tokens after the first, per token",
            buckets=_SECONDS,
        )
        self.queue_time: Histogram = named(
            Histogram, "queue_seconds", "From arrival to a slot", buckets=_SECONDS
        )
        self.tokens_per_round: Histogram = named(
            Histogram,
            "tokens_per_round",
            "Of each sample, its first token aside",
            buckets=(1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8),
        )
        self.prompt_tokens: Counter = named(Counter, "prompt_tokens", "Prompt tokens admitted")
        self.generated_tokens: Counter = named(Counter, "generated_tokens", "Tokens handed out")
        self.rounds: Counter = named(Counter, "rounds", "Speculative rounds")
        self.prefill_steps: Counter = named(Counter, "prefill_steps", "Prefill steps")
        self.failed_rounds: Counter = named(Counter, "failed_rounds", "Rounds that failed")
        self.non_finite: Counter = named(
            Counter, "non_finite_samples", "Samples that ended with logits that were not finite"
        )
        self.running: Gauge = named(Gauge, "running", "Samples in a slot")
        self.waiting: Gauge = named(Gauge, "waiting", "Samples and scores that wait")
        self.compile_seconds: Gauge = named(Gauge, "compile_seconds", "Spent compiling")
        self.compiled_programs: Gauge = named(
            Gauge, "compiled_programs", "Compiled, or read from the cache of programs"
        )
        self.state_bytes: Gauge = named(Gauge, "state_bytes", "Bytes of the decode state")
        self.parameter_bytes: Gauge = named(Gauge, "parameter_bytes", "Bytes of the parameters")

    def value(self, name: str) -> float:
        """The value of a metric without labels, by its name without `qwen4jax_`."""
        found = self.registry.get_sample_value(f"qwen4jax_{name}")
        assert found is not None, name
        return found

    def listen(self, host: str, port: int) -> int:
        """Serves the metrics over HTTP in a thread of its own; returns the port.

        Raises:
            OSError: the port is taken.
        """
        server, _ = start_http_server(port, addr=host, registry=self.registry)
        return server.server_port
