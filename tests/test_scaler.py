"""The loss scale against a plain Python account of the same rules."""

import logging
import math

import pytest
import torch

from lightning_mixprec import DynamicLossScaler

BAD, GOOD = torch.tensor(True), torch.tensor(False)


def play(scaler: DynamicLossScaler, batches: str) -> list[float]:
    """Feed a string of good (.) and bad (x) batches, return the scale after each."""
    scales = []
    for batch in batches:
        scaler.update(BAD if batch == "x" else GOOD)
        scales.append(float(scaler.scale))
    return scales


def test_shrinks_on_overflow_and_grows_after_a_run():
    scaler = DynamicLossScaler(init_scale=8, growth_interval=3)
    assert play(scaler, "x..x...") == [4, 4, 4, 2, 2, 2, 4]
    assert [int(scaler.skipped_steps), int(scaler.real_steps), int(scaler.consecutive_skips)] == [2, 5, 0]


@pytest.mark.parametrize("scaler", [DynamicLossScaler, DynamicLossScaler.static])
@pytest.mark.parametrize("stepped", [None, True, False])
def test_a_batch_counts_the_same_whether_the_host_or_the_device_knows_of_it(scaler, stepped):
    by_host, by_device = scaler(8.0), scaler(8.0)
    by_host.growth_interval = by_device.growth_interval = 2
    for batch in "..x.xx...":
        by_host.update(batch == "x", stepped)
        by_device.update(BAD if batch == "x" else GOOD, stepped)
        assert by_host.state_dict() == by_device.state_dict()


def test_factors_are_the_users():
    assert play(DynamicLossScaler(init_scale=64, growth_factor=4, backoff_factor=0.25, growth_interval=1), "x..") == [
        16,
        64,
        256,
    ]


def test_hysteresis_tolerates_overflows_and_is_refilled_by_growth():
    scaler = DynamicLossScaler(init_scale=8, hysteresis=2, growth_interval=2)
    assert play(scaler, "xxx..xx") == [8, 4, 2, 2, 4, 4, 2]


def test_stays_within_bounds():
    """T03: a tiny loss may grow the scale for ever; it stays finite and capped. It never decays to zero either."""
    assert play(DynamicLossScaler(init_scale=2**22, growth_interval=1), "......")[-1] == 2**24
    scaler = DynamicLossScaler(init_scale=2)
    assert play(scaler, "x" * 400)[-1] == 2**-14
    assert scaler.at_floor
    assert int(scaler.consecutive_skips) == 400


@pytest.mark.parametrize(
    "scaler",
    [
        DynamicLossScaler(init_scale=128, growth_factor=1, backoff_factor=1),
        DynamicLossScaler(init_scale=128, min_scale=128, max_scale=128),
        DynamicLossScaler.static(128),
        DynamicLossScaler.static(2**30),  # bounds are for scales that move
    ],
)
def test_static_scale_counts_but_does_not_move(scaler):
    start = float(scaler.scale)
    assert play(scaler, "x." * 3000)[-1] == start
    assert scaler.is_static
    assert not scaler.at_floor
    assert int(scaler.skipped_steps) == 3000


def test_scaling_and_unscaling_are_exact_for_powers_of_two():
    for exponent in range(-14, 25):
        scaler = DynamicLossScaler(init_scale=2.0**exponent)
        loss = torch.tensor(0.1)
        assert torch.equal(scaler.scale_loss(loss) * scaler.inverse_scale(), loss)


def test_half_loss_is_widened_before_scaling():
    """A fp16 loss of 3 times 2^15 would be inf."""
    scaled = DynamicLossScaler().scale_loss(torch.tensor(3.0, dtype=torch.float16))
    assert scaled.dtype == torch.float32
    assert scaled == 3 * 2**15


def test_state_round_trips_at_non_default_values():
    scaler = DynamicLossScaler(hysteresis=3, growth_interval=5)
    play(scaler, "..xx.x..")
    state = scaler.state_dict()
    assert all(isinstance(value, (int, float)) for value in state.values())
    other = DynamicLossScaler(hysteresis=3, growth_interval=5)
    other.load_state_dict(state)
    assert other.state_dict() == state
    assert state["hysteresis_tracker"] < 3
    assert state["growth_tracker"] == 2
    assert play(other, "...x.") == play(scaler, "...x.")


def test_configuration_wins_over_the_checkpoint(caplog):
    """T26: settings in a GradScaler state are logged, not taken."""
    stock = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=1000)
    stock.scale(torch.ones(()))  # creates its tensors
    scaler = DynamicLossScaler(growth_interval=7, backoff_factor=0.25)
    with caplog.at_level(logging.WARNING):
        scaler.load_state_dict(stock.state_dict())
    assert float(scaler.scale) == 2**12
    assert (scaler.growth_interval, scaler.backoff_factor) == (7, 0.25)
    assert "growth_interval=7" in caplog.text
    assert "backoff_factor=0.25" in caplog.text


def test_state_outside_the_bounds_is_brought_inside_and_said(caplog):
    scaler = DynamicLossScaler(max_scale=2**16)
    with caplog.at_level(logging.WARNING):
        scaler.load_state_dict({"scale": 2.0**20})
    assert float(scaler.scale) == 2**16
    assert "outside" in caplog.text
    with pytest.raises(ValueError, match=r"scale.*inf"):
        scaler.load_state_dict({"scale": math.inf})
    with pytest.raises(ValueError, match="'scale'"):
        scaler.load_state_dict({})


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("init_scale", 0),
        ("init_scale", math.inf),
        ("init_scale", math.nan),
        ("init_scale", 2.0**30),
        ("growth_factor", 0.5),
        ("backoff_factor", 2),
        ("backoff_factor", 0),
        ("growth_interval", 0),
        ("hysteresis", 0),
        ("min_scale", 0),
        ("min_scale", 2.0**20),
        ("max_scale", math.inf),
        ("max_consecutive_skips", 0),
    ],
)
def test_bad_values_are_named(argument, value):
    with pytest.raises(ValueError, match="must be"):
        DynamicLossScaler(**{argument: value})
