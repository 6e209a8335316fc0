from toy_runs import TARGET, job

from experiments.runs.files import read_json
from experiments.sweep.executors.local import run_local


def test_a_run_forked_from_a_server_that_holds_torch_trains_with_its_own_threads(tmp_path):
    one, another = job(tmp_path, "torch"), job(tmp_path, "torch", seed=1)
    run_local([one], target=TARGET, preload=("torch",), threads=1)
    run_local([another], target=TARGET, preload=("torch",), threads=2)  # by the server that was started for one
    assert read_json(one.directory / "result.json") == {"preloaded": True, "threads": 1, "moved": True}
    assert read_json(another.directory / "result.json") == {"preloaded": True, "threads": 2, "moved": True}
