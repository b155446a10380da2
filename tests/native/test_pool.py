"""The pool: sizes, errors, asynchronous calls, forks; and the choice of kernels."""

import json
import os
import subprocess
import sys
import threading

import pytest
import torch
from tests.native.conftest import forced_isa, kernel_name

from coattn import native
from coattn.native.core import extension


@pytest.fixture(autouse=True)
def _default_threads():
    yield
    native.set_threads(0)


def small_call(seed=0, tokens=100):
    torch.manual_seed(seed)
    memory = torch.randn(4, 2, 2, 32, 64).view(torch.uint8).flatten(1)
    table = torch.arange(4, dtype=torch.int32).view(1, 1, 4)
    blocks = native.Blocks(memory, "f32", 32, 2, 64)
    return native.plan_attend(torch.randn(1, 4, 64), blocks, table, torch.tensor([[tokens]], dtype=torch.int32))


def test_sizes():
    assert native.default_threads() >= 1
    native.set_threads(3)
    assert native.threads() == 3
    cpus = native.worker_cpus()
    assert cpus[0] == -1
    assert len(cpus) == 3
    native.set_threads(0)
    assert native.threads() == native.default_threads()
    with pytest.raises(native.NativeError, match="thread count"):
        native.set_threads(-1)


def test_workers_are_pinned_within_the_process_cpu_set():
    allowed = os.sched_getaffinity(0)
    native.set_threads(len(allowed))
    assert set(native.worker_cpus()[1:]) <= allowed
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});"
        "from coattn import native; assert native.default_threads() == 1; print(native.threads())"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "1"


def test_importing_starts_no_threads():
    code = (
        "import os, torch; before = len(os.listdir('/proc/self/task'));"
        "from coattn import native; print(len(os.listdir('/proc/self/task')) - before)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "0"


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_an_exception_travels_to_the_caller_and_the_pool_lives_on(threads):
    native.set_threads(threads)
    for worker in range(threads):
        with pytest.raises(RuntimeError, match=f"worker {worker} failed"):
            extension.fail_on_worker(worker)
        extension.fail_on_worker(threads)  # nobody


def test_results_after_sleeping():
    """Workers that went to sleep wake up."""
    native.set_threads(2)
    native.set_spin_us(0)
    call = small_call()
    first = call.run().out.clone()
    for _ in range(50):
        assert len(extension.job_latency(0, 20, 0.0)) == 20
        assert torch.equal(call.run().out, first)


def test_submit_and_wait():
    calls = [small_call(i) for i in range(20)]
    expected = [call.run().out.clone() for call in calls]
    pending = [call.submit() for call in calls]
    for p, want in zip(pending, expected, strict=True):
        assert torch.equal(p.wait().out, want)
    with pytest.raises(native.NativeError, match="not waiting"):
        pending[0].wait()


def test_submit_carries_errors_and_survives_a_new_pool():
    bad, good = small_call(tokens=129), small_call()
    expected = good.run().out.clone()
    failing, running = bad.submit(), good.submit()
    native.set_threads(1)
    with pytest.raises(native.NativeError, match="claims 129 tokens"):
        failing.wait()
    assert torch.equal(running.wait().out, expected)


def test_callers_on_many_threads():
    call = small_call()
    expected = call.run().out.clone()
    wrong = []

    def work(mine):
        for _ in range(30):
            if not torch.equal(mine.run().out, expected):
                wrong.append(1)

    workers = [threading.Thread(target=work, args=(small_call(),)) for _ in range(4)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    assert not wrong


def test_a_forked_child_gets_a_pool_of_its_own():
    call = small_call()
    expected = call.run().out.clone()
    pending = call.submit()
    pending.wait()
    child = os.fork()
    if child == 0:
        ok = torch.equal(call.run().out, expected) and torch.equal(call.submit().wait().out, expected)
        os._exit(0 if ok else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert torch.equal(call.run().out, expected)


def test_kernels_can_be_forced():
    usable = [name for name, reason in native.isas().items() if not reason]
    assert usable[0] == "generic"
    assert native.isa() == usable[-1]
    for name in usable:
        with forced_isa(name):
            assert native.isa() == name
            assert kernel_name("bf16", torch.bfloat16, 4)
    with pytest.raises(native.NativeError, match="There are no 'sse9' kernels") as caught:
        native.force_isa("sse9")
    assert "generic" in caught.value.hint


@pytest.mark.parametrize(("name", "reason"), native.isas().items())
def test_forcing_what_the_machine_lacks_is_refused_with_the_reason(name, reason):
    if not reason:
        pytest.skip(f"this machine has {name}")
    with pytest.raises(native.NativeError) as caught:
        native.force_isa(name)
    assert reason in caught.value.sentence


@pytest.mark.slow
@pytest.mark.skipif(not extension.cpu_features()["avx512"], reason="nothing to hide")
def test_hidden_kernels_are_refused_and_named():
    """COATTN_HIDE_ISA stands in for a machine that lacks them."""
    environment = os.environ | {"COATTN_HIDE_ISA": "amx,avx512"}
    code = (
        "from coattn import native; from coattn.native.core import elem, extension\n"
        "print(native.isa(), extension.attend_kernel_name(elem('bf16'), elem('bf16'), 8, 128), sep='|')\n"
        "try: native.force_isa('amx')\n"
        "except native.NativeError as error: print(error.sentence, error.hint, sep='|')"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    chosen, refusal = run.stdout.strip().split("\n")
    assert chosen == "avx2|avx2"
    sentence, hint = refusal.split("|")
    assert sentence.startswith("This machine cannot run the amx kernels: ")
    assert sentence.count(".") == 1
    assert "'generic'" in hint
    command = [sys.executable, "-m", "coattn", "doctor", "--json"]
    doctor = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    uses = {use["part"]: use for use in json.loads(doctor.stdout)["uses"]}
    assert uses["CPU attention"]["choice"].startswith("C++ kernels, avx2,")
    assert "avx512: " in uses["CPU attention"]["reason"]
    assert "amx: " in uses["CPU attention"]["reason"]
    if not torch.cuda.is_available():
        assert uses["numbers"]["choice"] == "float32"


@pytest.mark.parametrize(("hidden", "left"), [("amx", "avx512"), ("neon", "generic"), ("dotprod", "neon")])
def test_hiding_one_set_leaves_the_others(hidden, left):
    if not extension.cpu_features()[hidden]:
        pytest.skip("nothing to hide")
    code = f"from coattn import native; print(native.isa(), native.isas()['{hidden}'])"
    environment = os.environ | {"COATTN_HIDE_ISA": hidden}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert run.stdout.strip() == f"{left} COATTN_HIDE_ISA hides it"


def test_features_agree_with_the_kernel_list():
    features = extension.cpu_features() | {"generic": True}
    features["avx512"] &= features["avx512_bf16"] and features["avx512_vnni"]
    assert {name: not reason for name, reason in native.isas().items()} == {n: features[n] for n in native.isas()}
    assert bool(features["amx_reason"]) != features["amx"]
