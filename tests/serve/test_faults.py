"""What fails inside: the requests it hits get a status, the others go on, the server serves."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qwen4jax.serve.client import Answer, Client, ServerError
from tests.serve.running import RunningServer, fault, in_background, until
from tests.weights.edit import REMOVED, change, tensors_of

Ids = Callable[..., list[int]]
LONG: dict[str, Any] = {"max_new_tokens": 80, "ignore_eos": True, "seed": 7}
ENDLESS: dict[str, Any] = {**LONG, "max_new_tokens": 2000}
SHORT: dict[str, Any] = {"max_new_tokens": 16, "ignore_eos": True, "seed": 8}


def test_a_row_of_nan_ends_alone(server: RunningServer, client: Client, ids: Ids):
    """SRV-11: it is an error, not token 0; the company is as it is alone; the status says so."""
    prompts = [ids(n) for n in (5, 70, 12)]
    want = [client.generate(prompt, **LONG).token_ids for prompt in prompts]
    before = server.status()
    calls = [lambda p=p: client.generate(p, **LONG) for p in prompts]
    with (
        pytest.raises(ServerError, match="INTERNAL: sample 0: logits were not finite") as caught,
        in_background(*calls) as results,
    ):
        client.generate(ids(9), **LONG, **fault("nan"), request_id="to-be-spoilt")
    assert [one.token_ids for one in results] == want
    after = server.idle()
    assert after.non_finite_samples == before.non_finite_samples + 1
    assert after.failed_rounds == before.failed_rounds
    assert caught.value.request_id == "to-be-spoilt"
    assert "to-be-spoilt" in after.last_fault
    # every slot in turn, the spoilt one among them
    with in_background(*calls, lambda: client.generate(prompts[0], **LONG)) as results:
        pass
    assert [one.token_ids for one in results] == [*want, want[0]]


def test_a_failed_round_fails_its_requests_only(server: RunningServer, client: Client, ids: Ids):
    """The device loses the state of four streams; four that wait are answered, and all later."""
    want = client.generate(ids(11), **SHORT).token_ids
    before = server.status()
    running = [client.stream(ids(5), **ENDLESS) for _ in range(3)]
    for stream in running:
        next(stream)
    with in_background(lambda: client.generate(ids(6), **LONG, **fault("hold=0"))) as fourth:
        until(lambda: server.status().running == 4)
        # the device holds still until a stream goes: all four are there, in any order
        with in_background(
            *[lambda: client.generate(ids(11), **SHORT)] * 3,
            lambda: client.generate(ids(11), **SHORT, **fault("lost-round")),
        ) as waiting:
            until(lambda: server.status().waiting == 4)
            running.pop().close()
    waiting += fourth
    # one of the waiting ones got the free slot and brought the fault, or was hit by it
    assert server.idle().failed_rounds == before.failed_rounds + 1
    for stream in running:
        with pytest.raises(ServerError, match="INTERNAL: the round of this request failed"):
            list(stream)
    served = [one for one in waiting if isinstance(one, Answer)]
    failed = [one for one in waiting if isinstance(one, ServerError)]
    assert len(served) + len(failed) == 5
    assert all(one.token_ids == want for one in served if len(one.token_ids) == 16)
    assert all("the server goes on" in one.message for one in failed)
    assert not any("Traceback" in one.message or "deleted" in one.message for one in failed)
    # the log has what the clients were not told
    assert server.logged(lambda line: "deleted" in line.get("trace", ""))
    assert client.generate(ids(11), **SHORT).token_ids == want
    server.serves()
    assert server.status().slots == 4


def test_a_slots_next_tenant_has_none_of_its_drafts(client: Client, ids: Ids):
    """SRV-14: dropped between draft and verification, then taken again: as if it were new.

    There is no preemption: a slot has room for its request from the start. What could be left
    behind is that of a request that was cancelled, and a request that is sent again with what it
    had so far.
    """
    whole = client.generate(ids(7), temperature=0.0, max_new_tokens=30, ignore_eos=True)
    for count in (1, 2, 6):
        # long: a busy server joins bursts, and has to have as many chunks all the same
        streams = [client.stream(ids(9), **ENDLESS) for _ in range(4)]
        for stream in streams:
            for _ in range(count):
                next(stream)
        for stream in streams:
            stream.close()
        got = client.generate(ids(7), temperature=0.0, max_new_tokens=30, ignore_eos=True)
        assert got.token_ids == whole.token_ids
        # drafts are no part of the answer, yet of the work: the same rounds, the same drafts
        assert got.finish.rounds == whole.finish.rounds
    resumed = client.generate(
        [*ids(7), *whole.token_ids[:13]], temperature=0.0, max_new_tokens=17, ignore_eos=True
    )
    assert resumed.token_ids == whole.token_ids[13:]


def test_the_watchdog_turns_health_red_and_green_again(
    server: RunningServer, client: Client, ids: Ids
):
    """A round that takes longer than the two seconds it may: until both names are seen red."""
    server.serves()
    with in_background(lambda: client.generate(ids(5), **SHORT, **fault("hold=0"))) as results:
        until(lambda: server.health() == "NOT_SERVING")
        until(lambda: server.health("qwen4jax.v1.Generation") == "NOT_SERVING")
        server.release()
    assert isinstance(results[0], Answer)
    server.serves()
    assert server.wait_for("no round")["seconds"] >= 2


def test_faults_are_for_tests(client: Client, ids: Ids):
    with pytest.raises(ServerError, match="INVALID_ARGUMENT: x-test-fault: 'fire' is no fault"):
        client.generate(ids(5), **SHORT, **fault("fire"))
    with pytest.raises(ServerError, match="INVALID_ARGUMENT: x-test-fault: 'x' is no number"):
        client.generate(ids(5), **SHORT, **fault("stall=x"))


@pytest.fixture
def copied(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "copy"))


def test_without_a_draft_head_the_status_says_so(start: Callable[..., RunningServer], copied: Path):
    """SRV-13: all of its tensors are missing: no drafts, and the status says why; not silently."""
    heads = [name.replace(".", "__") for name in tensors_of(copied) if name.startswith("mtp.")]
    change(copied, **dict.fromkeys(heads, REMOVED))
    with start(model=copied) as server:
        status = server.ready().status()
        assert not status.drafting
        assert "no mtp.* tensors" in status.drafting_off_reason
        with server.client() as client:
            model = client.model()
            assert (model.drafts, list(model.notes)) == (0, [status.drafting_off_reason])
            (line,) = (one for one in server.lines if one["event"] == "note")
            assert line["text"] == status.drafting_off_reason
            answer = client.generate([5, 6], max_new_tokens=9, ignore_eos=True)
            assert answer.finish.tokens_per_round == 1
        server.signal()
        assert server.exit_code() == 0


def test_a_damaged_draft_head_is_no_server(start: Callable[..., RunningServer], copied: Path):
    """SRV-13: one tensor is missing: it does not start, and names the tensor."""
    head = next(name for name in tensors_of(copied) if name.startswith("mtp."))
    change(copied, **{head.replace(".", "__"): REMOVED})
    with start(model=copied) as server:
        assert server.exit_code() == 2
        (line,) = (one for one in server.lines if one["event"].startswith("failed"))
        assert head in line["event"]
        assert "trace" not in line


def test_a_drafting_server_says_so(server: RunningServer):
    status = server.status()
    assert status.drafting
    assert status.drafting_off_reason == ""
