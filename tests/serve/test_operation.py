"""What who runs it sees: metrics, logs, progress, the cache of programs, the command lines."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from qwen4jax.serve.client import Client, ServerError
from qwen4jax.serve.model import load_served
from qwen4jax.serve.options import parse
from tests.serve.running import PATIENCE, ROOT, RunningServer, in_background

Ids = Callable[..., list[int]]
Start = Callable[..., RunningServer]


def test_metrics_and_status_add_up(server: RunningServer, client: Client, ids: Ids):
    was, before = server.idle(), server.metrics()
    answers = [
        client.generate(ids(20), max_new_tokens=30, ignore_eos=True, seed=seed) for seed in range(3)
    ]
    client.score(ids(40))
    with pytest.raises(ServerError):
        client.generate([-1])
    after, now = server.metrics(), server.idle()

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    assert grown('qwen4jax_requests_total{code="OK",method="Generate"}') == 3
    assert grown('qwen4jax_requests_total{code="OK",method="Score"}') == 1
    assert grown('qwen4jax_requests_total{code="INVALID_ARGUMENT",method="Generate"}') == 1
    assert grown("qwen4jax_generated_tokens_total") == 90
    assert grown("qwen4jax_prompt_tokens_total") == 3 * 20 + 40
    assert grown("qwen4jax_time_to_first_token_seconds_count") == 3
    assert grown("qwen4jax_inter_token_seconds_count") == 3 * 29
    assert grown("qwen4jax_queue_seconds_count") == 3
    assert grown("qwen4jax_tokens_per_round_count") == 3
    per_round = sum(one.finish.tokens_per_round or 0 for one in answers)
    assert grown("qwen4jax_tokens_per_round_sum") == pytest.approx(per_round)
    assert grown("qwen4jax_failed_rounds_total") == 0
    assert grown("qwen4jax_compiled_programs") == 0
    assert after["qwen4jax_running"] == after["qwen4jax_waiting"] == 0
    assert after["qwen4jax_compile_seconds"] > 0
    assert after["qwen4jax_state_bytes"] == now.state_bytes > 10_000
    assert after["qwen4jax_parameter_bytes"] > 10_000
    assert after["process_resident_memory_bytes"] > 10_000
    assert now.generated_tokens - was.generated_tokens == 90
    assert now.rounds - was.rounds == grown("qwen4jax_rounds_total")
    # one round is in flight when a stream ends
    assert 0 <= now.rounds - was.rounds - sum(one.finish.rounds for one in answers) <= 6


def test_logs_have_a_line_per_call(server: RunningServer, client: Client, ids: Ids):
    with pytest.raises(ServerError):
        client.generate([-7], request_id="log-me-1")
    client.generate(ids(3), max_new_tokens=2, request_id="log-me-2")
    first, second = (
        server.logged(lambda line, name=name: line.get("request_id") == name)
        for name in ("log-me-1", "log-me-2")
    )
    assert first["event"] == second["event"] == "call"
    assert first["code"] == "INVALID_ARGUMENT"
    assert first["details"].startswith("token_ids.ids[0]: -7")
    assert second["code"] == "OK"
    assert second["method"] == "Generate"
    assert second["seconds"] >= 0
    assert all({"time", "level", "event"} <= set(line) for line in server.lines)


def test_progress_before_serving(server: RunningServer):
    """Every program is named before it is compiled."""
    events = [line["event"] for line in server.lines]
    first = events.index("serving")
    assert events[0] == "listening"
    compiling = [event for event in events[:first] if event.startswith("compiling ")]
    assert len(compiling) == 3
    assert "round of 4 slots (1 of 3)" in compiling[0]
    assert any(event.startswith("compiled in ") for event in events[:first])


def test_the_cache_of_programs_is_used(server: RunningServer, shared: Path):
    """The server of this process, or one before it, has filled it."""
    assert server.status().compiled_programs > 0
    assert any((shared / "programs").iterdir())


def test_ports_that_are_taken(start: Start, server: RunningServer):
    """One line and 2: before the model is read."""
    with start("--port", str(server.port)) as other:
        assert other.exit_code() == 2
        (line,) = other.lines
        assert line["event"].startswith("--port: cannot listen on 127.0.0.1:")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with start("--metrics-port", str(taken.getsockname()[1])) as other:
            assert other.exit_code() == 2
            assert other.lines[-1]["event"].startswith("--metrics-port: ")


@pytest.mark.parametrize("flag", ["--max-context", "--draft-vocab"])
def test_options_that_do_not_fit_the_model(start: Start, flag: str):
    with start(flag, "100000") as server:
        assert server.exit_code() == 2
        events = [line["event"] for line in server.lines]
        assert any(f"{flag}: 100000 is over the model's" in event for event in events)
        assert not any("trace" in line for line in server.lines)


def test_drafts_among_the_lowest_ids(model: Path):
    options = parse(["--model", str(model), *"--draft-vocab 300 --draft-weights fp8".split()])
    params = load_served(options, lambda done, total: None).params
    assert params.mtp is not None
    assert params.mtp.lm_head is not None
    assert params.mtp.lm_head.shape[0] == 300
    assert params.config.quantization.draft == "fp8"


def run(*command: str, flags: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *flags, *command],
        cwd=ROOT,
        env=os.environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )


def test_help_is_grouped_and_quick():
    """Nothing heavy is imported for it, nor for the client."""
    program = (
        "import runpy, sys\n"
        "sys.argv[1:] = ['--help']\n"
        "try: runpy.run_module(NAME, run_name='__main__')\n"
        "except SystemExit: pass\n"
        "assert not {'jax', 'numpy', 'tokenizers', 'flax'} & set(sys.modules)\n"
    )
    for name, groups in (
        ("qwen4jax.serve", {"model:", "size:", "network:", "security:", "running:"}),
        ("qwen4jax.serve.client_command", {"prompt:", "server:"}),
    ):
        done = run("-c", program.replace("NAME", repr(name)), flags=("-W", "error"))
        assert done.returncode == 0, done.stderr
        assert groups <= set(done.stdout.splitlines())
        assert max(map(len, done.stdout.splitlines())) <= 100


def test_the_clients_command(server: RunningServer, client: Client, ids: Ids):
    """It streams text, or ids for ids; what is wrong is one line and 1."""
    options = "--temperature 0 --max-new-tokens 12 --ignore-eos --target".split()
    with in_background(
        lambda: run("-m", "qwen4jax.serve.client", "Hello", *options, server.target),
        lambda: run("-m", "qwen4jax.serve.client", "--ids", "5,6", *options, server.target),
        lambda: run("-m", "qwen4jax.serve.client", "--chat", "Hi", *options, server.target),
        lambda: run("-m", "qwen4jax.serve.client", "--ids=-5", *options, server.target),
    ) as done:
        pass
    by_text, by_ids, by_chat, wrong = done
    wanted = dict(temperature=0.0, max_new_tokens=12, ignore_eos=True)
    assert by_text.stdout == client.generate("Hello", **wanted).text + "\n"
    assert by_ids.stdout.split() == [str(t) for t in client.generate([5, 6], **wanted).token_ids]
    chat = [{"role": "user", "content": "Hi"}]
    assert by_chat.stdout == client.generate(chat, **wanted).text + "\n"
    assert by_chat.stderr.startswith("12 tokens (length) in ")
    assert (wrong.returncode, by_text.returncode) == (1, 0)
    assert "INVALID_ARGUMENT: token_ids.ids[0]: -5 is not in" in wrong.stderr
    assert len(wrong.stderr.splitlines()) == 1
