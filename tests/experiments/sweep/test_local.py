import os
import threading

import pytest
from toy_runs import TARGET, attempts, job

from experiments.runs.claim import Claim
from experiments.runs.files import read_json
from experiments.runs.status import Status, status_of
from experiments.sweep.executors import find, local
from experiments.sweep.executors.local import run_local
from experiments.sweep.job import Outcome, Progress
from registry import UserError

PRELOAD = ("experiments.sweep.launch",)


def run(jobs, **options):
    return {outcome.job.run_id: outcome for outcome in run_local(jobs, target=TARGET, preload=PRELOAD, **options)}


@pytest.mark.parametrize(
    ("deed", "status", "reason"),
    [
        ("raise", "failed", "ValueError: at step three"),
        ("refuse", "failed", "ValueError: heads=3 does not divide dim=8"),
        ("kill", "interrupted", "its process was ended by SIGKILL"),
        ("exit", "failed", "exited with code 3"),
        ("diverge", "diverged", "loss is nan"),
    ],
)
def test_a_run_that_ends_badly_costs_itself_alone(tmp_path, deed, status, reason):
    bad, good = job(tmp_path, deed), job(tmp_path, seed=1)
    outcomes = run([bad, good], processes=1)
    assert outcomes[bad.run_id] == Outcome(bad, status, reason)
    assert outcomes[good.run_id] == Outcome(good, "finished")
    said = read_json(bad.directory / "status.json")
    assert said == {"status": status, "reason": reason}
    assert status_of(bad.directory).status == status


def test_what_a_run_prints_is_in_its_log_with_the_traceback(tmp_path):
    bad = job(tmp_path, "raise")
    run([bad])
    text = bad.log.read_text()
    assert "the run speaks" in text
    assert "Traceback" in text
    assert "task.deed=raise seed=0" in text


def test_a_killed_run_keeps_its_last_words(tmp_path):
    killed = job(tmp_path, "kill")
    run([killed])
    assert "the run speaks" in killed.log.read_text()


def test_progress_comes_back_and_every_run_ends_once(tmp_path):
    events = []
    jobs = [job(tmp_path, seed=seed) for seed in range(3)]
    run(jobs, on_event=events.append)
    for one in jobs:
        of_one = [event for event in events if event.job == one]
        assert of_one[0] == Progress(one, 0, 0, "starting")
        assert of_one[-2:] == [Progress(one, 3, 3, "train"), Outcome(one, "finished")]


def test_no_more_processes_than_asked_for_are_active(tmp_path):
    active, most = set(), []

    def count(event):
        if isinstance(event, Outcome):
            active.discard(event.job.run_id)
        elif event.text == "starting":
            active.add(event.job.run_id)
            most.append(len(active))

    run([job(tmp_path, seed=seed) for seed in range(5)], processes=2, on_event=count)
    assert max(most) == 2


def test_each_run_has_a_process_of_its_own(tmp_path):
    run([job(tmp_path, seed=seed) for seed in range(3)], processes=1)
    numbers = [number for pids in attempts(tmp_path).values() for number in pids]
    assert len({*numbers, os.getpid()}) == 4


def test_a_run_that_another_process_works_on_is_not_started(tmp_path):
    one = job(tmp_path)
    one.directory.mkdir(parents=True)
    claim = Claim.acquire(one.directory)
    assert run([one])[one.run_id].status == "running"
    assert not attempts(tmp_path)
    claim.release()


def test_a_run_that_is_claimed_between_the_look_and_the_start_is_left_to_its_holder(tmp_path, monkeypatch):
    one = job(tmp_path)
    one.directory.mkdir(parents=True)
    claim = Claim.acquire(one.directory)
    monkeypatch.setattr(local, "_done_elsewhere", lambda job, words: None)
    assert run([one])[one.run_id].status == "running"
    assert not (one.directory / "status.json").exists()
    claim.release()


def test_a_run_that_failed_elsewhere_while_it_waited_is_not_run_again(tmp_path):
    first, second = job(tmp_path), job(tmp_path, seed=1)

    def fail_second(event):
        if event == Progress(first, 0, 0, "starting"):
            local.mark(second.directory, "failed", "elsewhere")

    outcomes = run([first, second], processes=1, on_event=fail_second)
    assert outcomes[second.run_id] == Outcome(second, "failed", "elsewhere")
    assert second.run_id not in attempts(tmp_path)
    assert run([second])[second.run_id].status == "finished"  # asked for again


def test_an_interrupt_asks_the_runs_to_end_and_waits_for_them(tmp_path):
    jobs = [job(tmp_path, "wait", seed) for seed in range(3)]

    events = []

    def interrupt(event):
        events.append(event)
        if isinstance(event, Progress) and event.step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_local(jobs, target=TARGET, preload=PRELOAD, on_event=interrupt)
    begun = attempts(tmp_path)
    assert begun
    assert {event.job.run_id for event in events if event.text == "ending"} >= set(begun)
    for one in jobs:
        if one.run_id in begun:
            assert status_of(one.directory) == Status("interrupted", "asked to end (SIGTERM)")
    for pids in begun.values():
        with pytest.raises(ProcessLookupError):
            os.kill(pids[0], 0)


def test_a_run_that_does_not_end_when_asked_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "GRACE_SECONDS", 0.3)
    stubborn = job(tmp_path, "ignore")
    timer = []

    def interrupt(event):
        if isinstance(event, Progress) and event.step == 3 and not timer:
            timer.append(threading.Event())
            timer[0].wait(0.3)  # until it has closed its ears
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_local([stubborn], target=TARGET, preload=PRELOAD, on_event=interrupt)
    assert read_json(stubborn.directory / "status.json") == {"status": "interrupted", "reason": "its process was ended by SIGKILL"}


def test_a_run_whose_holder_has_just_left_it_is_neither_failed_nor_lost(tmp_path, monkeypatch):
    one = job(tmp_path)
    one.directory.mkdir(parents=True)
    claim = Claim.acquire(one.directory)
    monkeypatch.setattr(local, "_done_elsewhere", lambda job, words: None)
    monkeypatch.setattr(local, "status_of", lambda directory: Status("interrupted", "its holder is gone"))
    assert run([one])[one.run_id] == Outcome(one, "running")
    claim.release()


@pytest.mark.parametrize("option", ["processes", "threads"])
def test_less_than_one_is_refused_by_name(tmp_path, option):
    with pytest.raises(UserError, match=rf"executor\.{option} must be at least 1; got 0"):
        run([job(tmp_path)], **{option: 0})


def test_an_unknown_executor_is_answered_with_the_nearest():
    assert find("local") is run_local
    with pytest.raises(UserError, match=r"no executor is named 'locale'\. Did you mean 'local'"):
        find("locale")
