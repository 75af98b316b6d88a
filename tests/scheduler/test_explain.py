"""Why a request does not fit, and which one near to it would."""

import json
from dataclasses import replace

import pytest
from anyaccel.model import UNITS_PER_DEVICE, Health, Problem, ProblemKind, VendorReport, VendorState
from anyaccel.scheduler import ReasonCode, Scheduler, parse_request
from hypothesis import given, settings
from hypothesis import strategies as st
from lengths import length
from small_machines import chip_rule, chips, gpus, machine, possible


def why(request, *devices, known=("A100",), taken=()):
    """The verdict on a request after others were served."""
    scheduler = Scheduler(machine(*devices), chip_rule, known)
    for text, note in taken:
        scheduler.allocate(text, note=note)
    return scheduler.why(request)


TWO = gpus(2)
HIDDEN = [TWO[0], replace(TWO[1], visible=False)]
BROKEN = [TWO[0], replace(TWO[1], health=Health.UNHEALTHY, health_reason="fell off the bus")]
NO_LINKS = gpus(4, links={(0, 1): 1})


@pytest.mark.parametrize(
    ("request_", "devices", "codes", "text"),
    [
        ("GPU:2", [TWO], [], "GPU:2 fits now."),
        (
            "gpu:3",
            [TWO],
            ["not-enough"],
            "gpu:3 can never fit: this machine has 2 GPU (2 H100).\nnearest that fits: gpu:2",
        ),
        ("H100:3", [TWO], ["not-enough"], "H100:3 can never fit: this machine has 2 H100.\nnearest that fits: H100:2"),
        ("GPU|XPU:2", [TWO], [], "GPU|XPU:2 fits now."),
        (
            "XPU|GPU:3",
            [TWO],
            ["not-enough", "unknown-name"],
            (
                "XPU|GPU:3 can never fit: this machine has 2 XPU|GPU (2 H100); no installed plug-in knows XPU.\n"
                "nearest that fits: XPU|GPU:2"
            ),
        ),
        ("A100:1", [TWO], ["not-enough"], "A100:1 can never fit: this machine has no A100 (it has 2 H100)."),
        ("A100:1", [], ["not-enough"], "A100:1 can never fit: this machine has no A100 and no other device."),
        (
            "GPU:2",
            [HIDDEN],
            ["not-enough", "hidden"],
            (
                "GPU:2 can never fit: this machine has 2 GPU (2 H100); hidden by the environment: acme/1.\n"
                "nearest that fits: GPU:1"
            ),
        ),
        (
            "GPU:2",
            [BROKEN],
            ["not-enough", "unhealthy"],
            (
                "GPU:2 can never fit: this machine has 2 GPU (2 H100); unhealthy: acme/1 (fell off the bus).\n"
                "nearest that fits: GPU:1"
            ),
        ),
        (
            "GPU:1,mem=90GiB",
            [TWO],
            ["not-enough", "filter"],
            (
                "GPU:1,mem=90GiB can never fit: this machine has 2 GPU (2 H100); the largest memory is 80GiB, "
                "less than mem=90GiB.\nnearest that fits: GPU:1,mem=80GiB"
            ),
        ),
        (
            "GPU:0.5,mem=60GiB",
            [TWO],
            ["not-enough", "filter"],
            (
                "GPU:0.5,mem=60GiB can never fit: this machine has 2 GPU (2 H100); the largest memory is 80GiB, "
                "0.5 of it 40GiB, less than mem=60GiB.\nnearest that fits: GPU:0.75,mem=60GiB"
            ),
        ),
        (
            "TPU:1,mem=1GiB",
            [chips(1)],
            ["not-enough", "filter"],
            "TPU:1,mem=1GiB can never fit: this machine has 1 TPU (1 CHIP-V5); the memory is unknown of tensor/0.",
        ),
        (
            "TPU:0.5",
            [chips(2)],
            ["not-enough", "not-fractional"],
            (
                "TPU:0.5 can never fit: this machine has 2 TPU (2 CHIP-V5); "
                "given out whole only: tensor/0-1.\n"
                "nearest that fits: TPU:1"
            ),
        ),
        (
            "TPU:3",
            [chips(4)],
            ["vendor-rule"],
            "TPU:3 can never fit: chips are given out as 1, 2, 4 or 8 (got 3).\nnearest that fits: TPU:4",
        ),
        (
            "TPU:3,else=cpu",
            [chips(2)],
            ["not-enough"],
            (
                "TPU:3,else=cpu can never fit: this machine has 2 TPU (2 CHIP-V5). It runs on the CPU instead.\n"
                "nearest that fits: TPU:2,else=cpu"
            ),
        ),
        (
            "GPU:3",
            [TWO, gpus(1, "A100")],
            ["mixed-types"],
            (
                "GPU:3 can never fit: no 3 of 2 H100, 1 A100 are of one type (the option 'mixed' accepts several).\n"
                "nearest that fits: GPU:2"
            ),
        ),
        (
            "GPU:4,linked",
            [NO_LINKS],
            ["not-linked"],
            (
                "GPU:4,linked can never fit: no 4 of 4 H100 are all linked to each other directly.\n"
                "nearest that fits: GPU:2,linked"
            ),
        ),
        (
            "GPU:2 H100:1",
            [TWO],
            ["together"],
            (
                "GPU:2 H100:1 can never fit: each term fits alone; together they need more than 2 H100.\n"
                "nearest that fits: GPU:1 H100:1"
            ),
        ),
    ],
)
def test_a_verdict_on_a_free_machine(request_, devices, codes, text):
    verdict = why(request_, *devices)
    assert [reason.code.value for reason in verdict.reasons] == codes
    assert str(verdict) == text
    assert verdict.ever_fits is verdict.fits_now is (not codes)


@pytest.mark.parametrize(
    ("request_", "taken", "text"),
    [
        (
            "GPU:2",
            [("GPU:1", "train")],
            "GPU:2 does not fit now: 1 of 2 GPU free; held by A1 (train).\nfits now: GPU:1",
        ),
        (
            "GPU:2",
            [("GPU:0.3", ""), ("GPU:0.2", "")],
            "GPU:2 does not fit now: 1 of 2 GPU free, 1 in part; held by A1 (GPU:0.3), A2 (GPU:0.2).\nfits now: GPU:1",
        ),
        (
            "H100:0.8",
            [("GPU:0.3", "x"), ("GPU:1", "y")],
            (
                "H100:0.8 does not fit now: no H100 has 0.8 free, the most is 0.7; held by A1 (x), A2 (y).\n"
                "fits now: H100:0.7"
            ),
        ),
        (
            "GPU:1 GPU:1",
            [("GPU:1", "y")],
            "GPU:1 GPU:1 does not fit now: 1 of 2 devices free; held by A1 (y).\nfits now: GPU:1",
        ),
    ],
)
def test_a_verdict_on_a_busy_machine(request_, taken, text):
    verdict = why(request_, gpus(2), taken=taken)
    (reason,) = verdict.reasons
    assert reason.code is ReasonCode.TAKEN
    shown = str(verdict)
    for number, holder in enumerate(reason.holders, start=1):
        shown = shown.replace(f"{holder} (", f"A{number} (")
    assert shown == text
    assert verdict.ever_fits
    assert not verdict.fits_now


def test_free_devices_that_do_not_go_together_are_explained_too():
    scheduler = Scheduler(machine(chips(4)), chip_rule)
    first, second = (scheduler.allocate("TPU:1") for _ in range(2))
    scheduler.allocate("TPU:1")
    scheduler.release(second)
    scheduler.release(first)
    scheduler.allocate("TPU:1")
    verdict = scheduler.why("TPU:2")
    assert [reason.code for reason in verdict.reasons] == [ReasonCode.VENDOR_RULE, ReasonCode.TAKEN]
    assert verdict.reasons[0].message == "2 chips must be aligned neighbors (got [1, 3])"


def test_a_long_list_of_holders_is_cut():
    scheduler = Scheduler(machine(gpus(8)))
    for _ in range(8):
        scheduler.allocate("GPU", note="n")
    (reason,) = scheduler.why("GPU").reasons
    assert reason.message.endswith("(n) and 4 more")
    assert len(reason.holders) == len(reason.devices) == 8


def test_a_vendor_that_failed_is_named_where_its_devices_may_be_meant():
    problem = Problem(vendor="tensor", kind=ProblemKind.TIMEOUT, reason="it did not answer.")
    failed = VendorReport(vendor="tensor", resource="TPU", state=VendorState.FAILED, problem=problem)
    absent = VendorReport(vendor="other", resource="NPU", state=VendorState.ABSENT)
    scheduler = Scheduler(replace(machine(gpus(1)), vendors=(absent, failed)), known=["CHIP-V9"])
    assert str(scheduler.why("TPU:1")) == (
        "TPU:1 can never fit: this machine has no TPU (it has 1 H100); "
        "detection of vendor 'tensor' failed: it did not answer; 'anyaccel plugins tensor' says more."
    )
    codes = {
        text: [reason.code.value for reason in scheduler.why(text).reasons] for text in ("NPU", "CHIP-V9", "GPU:2")
    }
    assert codes == {"NPU": ["not-enough"], "CHIP-V9": ["not-enough", "vendor-failed"], "GPU:2": ["not-enough"]}


def test_a_verdict_is_json():
    data = json.loads(json.dumps(why("GPU:3", gpus(2)).to_json()))
    assert data == {
        "request": "GPU:3",
        "fits_now": False,
        "ever_fits": False,
        "cpu": False,
        "message": "GPU:3 can never fit: this machine has 2 GPU (2 H100).",
        "reasons": [
            {
                "code": "not-enough",
                "message": "this machine has 2 GPU (2 H100)",
                "term": "GPU:3",
                "devices": ["h100-0", "h100-1"],
                "holders": [],
                "filter": None,
            }
        ],
        "nearest": "GPU:2",
        "nearest_now": "GPU:2",
        "ways_out": [],
        "gaps": [],
    }


def test_the_nearest_request_is_found_on_large_machines_too():
    devices = gpus(512, "H100", links=0) + gpus(512, "A100")
    assert str(why("GPU:1000", devices).nearest) == "GPU:512"
    assert str(why("GPU:2000,mixed", devices).nearest) == "GPU:1024,mixed"
    islands = {(first, second): 1 for first in range(64) for second in range(first + 1, (first // 8 + 1) * 8)}
    assert str(why("GPU:50,linked", gpus(64, links=islands)).nearest) == "GPU:8,linked"


texts = st.lists(
    st.sampled_from(["GPU:1", "GPU:2", "GPU:4", "GPU:0.6", "TPU:1", "TPU:3", "TPU:0.5", "A100:1", "GPU:1,mem=90GiB"]),
    min_size=1,
    max_size=3,
)


@settings(max_examples=length(33, 100), deadline=None)
@given(
    texts, st.integers(0, 3), st.integers(0, 4), st.lists(st.sampled_from(["GPU:0.6", "GPU:1", "TPU:1"]), max_size=3)
)
def test_a_verdict_agrees_with_trying_everything(texts_, count, chip_count, taken):
    devices = (*gpus(count), *chips(chip_count))
    scheduler = Scheduler(machine(devices), chip_rule, known=["GPU", "TPU", "A100"])
    for text in taken:
        if scheduler.why(text).fits_now:
            scheduler.allocate(text)
    verdict = scheduler.why(texts_)
    empty = dict.fromkeys((device.id for device in devices), UNITS_PER_DEVICE)
    free = {device.id: scheduler.free(device.id) for device in devices}
    assert verdict.ever_fits == possible(devices, empty, verdict.request, chip_rule)
    assert verdict.fits_now == possible(devices, free, verdict.request, chip_rule)
    assert verdict.fits_now == (not verdict.reasons)
    assert all(reason.message for reason in verdict.reasons)
    if verdict.nearest:
        assert not verdict.ever_fits
        assert possible(devices, empty, verdict.nearest, chip_rule)
        assert parse_request(str(verdict.nearest)) == verdict.nearest
    if verdict.nearest_now:
        assert not verdict.fits_now
        assert possible(devices, free, verdict.nearest_now, chip_rule)


def test_a_reason_of_several_terms_is_told_once():
    verdict = why("GPU:0.4 GPU:0.4", gpus(1), taken=[("GPU:0.7", "job")])
    assert [reason.code for reason in verdict.reasons] == [ReasonCode.TAKEN, ReasonCode.TAKEN]
    assert verdict.message.count("no GPU has 0.4 free") == 1
