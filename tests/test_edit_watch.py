"""Changes by hand that round away in 16 bits are reported by name; what arrives, or was to change nothing, is not."""

import warnings

import lightning as L
import pytest
import torch
from reference import assert_same, loader, make_trainer, snapshot
from test_edits import PLUGINS, Net, decay
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode

from lightning_mixprec import MasterWeightPrecision, edit_watch
from lightning_mixprec.edit_watch import EditWatch
from lightning_mixprec.master import MasterWeights


def reports(edit=None, plugin=None, batches=8, module=None, hook="on_train_batch_end", callbacks=(), **kwargs):
    """Which edits a fit has reported."""
    module = Net() if module is None else module

    def edits(self, *_):
        if edit is not None:
            with torch.no_grad():
                edit(self)

    module.__class__ = type("Edits", (type(module),), {hook: edits})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(plugin or MasterWeightPrecision("bf16"), callbacks=list(callbacks), **kwargs)
        trainer.fit(module, loader(list(range(batches))), loader([0]))
    assert not _get_current_dispatch_mode_stack()
    return [str(each.message) for each in caught if "changed by hand" in str(each.message)]


def flatten_and_back(module):
    flat = nn.utils.parameters_to_vector([param.float() for param in module.parameters()])
    nn.utils.vector_to_parameters(flat * 0.9999, module.parameters())


def replace(module, factor=0.9999):
    module.body.weight.data = module.body.weight.data * factor


def write_a_copy(module):
    copy = module.body.weight.data.clone()
    copy.mul_(0.9999)
    module.body.weight.data = copy


TEACHER = torch.linspace(0.1, 0.2, 32 * 64).view(32, 64)

LOST = {
    "mul_": lambda m: m.body.weight.mul_(0.9999),
    "data": lambda m: m.body.weight.data.mul_(0.9999),
    "detach": lambda m: m.body.weight.detach().sub_(1e-4 * m.body.weight),
    "a part": lambda m: m.body.weight[3:5].mul_(0.9999),
    "lerp_": lambda m: m.body.weight.lerp_(TEACHER.to(m.body.weight), 1e-4),
    "noise": lambda m: m.body.weight.add_(torch.randn_like(m.body.weight), alpha=1e-6),
    "foreach": lambda m: torch._foreach_mul_([m.body.weight, m.body.bias], 0.9999),
    "foreach on data": lambda m: torch._foreach_lerp_([m.body.weight.data], [TEACHER.to(m.body.weight)], 1e-4),
    "out": lambda m: torch.mul(m.body.weight, 0.9999, out=m.body.weight),
    "with itself": lambda m: m.body.weight.add_(m.body.weight, alpha=-1e-4),
    "copy_": lambda m: m.body.weight.copy_(m.body.weight * 0.9999),
    "shrinks": lambda m: m.body.weight.copy_(m.body.weight.sign() * (m.body.weight.abs() - 2e-5).clamp_(min=0)),
    "shrinks in fp32": lambda m: m.body.weight.copy_(nn.functional.softshrink(m.body.weight.float(), 2e-5)),
    "shrinks a part": lambda m: m.body.weight[3:5].copy_(nn.functional.softshrink(m.body.weight[3:5], 2e-5)),
    "foreach copy_": lambda m: torch._foreach_copy_([m.body.weight], [nn.functional.softshrink(m.body.weight, 2e-5)]),
    "pulls": lambda m: m.body.weight.copy_(m.body.weight.float().lerp(TEACHER, 3e-4)),
    "other memory": replace,
    "a copy that was written to": write_a_copy,
    "a vector": flatten_and_back,
}


@pytest.mark.parametrize(
    ("how", "kind"),
    [*((how, "fp32") for how in LOST), *(("mul_", kind) for kind in ("split", "split24", "none", "fp16"))],
)
def test_what_rounds_away_is_reported_once_with_the_name_and_the_remedy(how, kind):
    report, *more = reports(LOST[how], PLUGINS[kind](), batches=9)
    assert not more
    for words in ("'body.weight'", "rounds away", "fp32_weights(pl_module)", "PrecisionPolicy(fp32="):
        assert words in report


def test_fp32_weights_the_remedy_is_silent_and_right():
    def edit(module):
        with module.trainer.precision_plugin.fp32_weights(module) as weights:
            decay(weights)

    assert reports(edit) == []


def swap(module):
    """An average is looked at and put away again."""
    kept = [param.detach().clone() for param in module.parameters()]
    for param in module.parameters():
        param.copy_(param.float() * 1.0001)
    for param, value in zip(module.parameters(), kept, strict=True):
        param.copy_(value)


def swap_memory(module):
    kept = [param.data for param in module.parameters()]
    for param in module.parameters():
        param.data = param.data.float() * 1.0001
    for param, value in zip(module.parameters(), kept, strict=True):
        param.data = value


FINE = {
    "nothing": None,
    "clamps nothing": lambda m: m.body.weight.clamp_(-1, 1),
    "clamps": lambda m: m.body.weight.data.clamp_(-0.01, 0.01),
    "clamps other memory": lambda m: setattr(m.body.weight, "data", m.body.weight.data.clamp(-1, 1)),
    "puts what is clamped": lambda m: m.body.weight.copy_(torch.clamp(m.body.weight, -1, 1)),
    "puts what is clamped in fp32": lambda m: m.body.weight.copy_(m.body.weight.float().clamp(-0.01, 0.01)),
    "shrinks much": lambda m: m.body.weight.copy_(nn.functional.softshrink(m.body.weight, 0.01)),
    "puts back what has not moved": lambda m: m.body.weight[3:5].copy_(m.state_dict()["body.weight"][3:5]),
    "large": lambda m: m.body.weight.mul_(0.9),
    "exact": lambda m: m.body.weight.mul_(0.5),
    "by one": lambda m: m.body.weight.mul_(1.0),
    "mask": lambda m: m.body.weight.mul_(m.body.weight.abs() > 0.05),
    "zeros": lambda m: m.body.weight.zero_(),
    "large noise": lambda m: m.body.weight.add_(torch.randn_like(m.body.weight), alpha=0.1),
    "initialised": lambda m: [nn.init.trunc_normal_(param) for param in m.parameters()],
    "loaded": lambda m: m.load_state_dict(m.state_dict()),
    "buffers and gradients": lambda m: torch.ones(3).bfloat16().mul_(0.9999),
    "swap": swap,
    "swap of memory": swap_memory,
    "wider for a while": lambda m: m.float(),
    "once": lambda m: replace(m) if m.global_step == 5 else None,
    "a copy": lambda m: setattr(m.body.weight, "data", m.body.weight.data.clone()),
    "another layout": lambda m: setattr(m.body.weight, "data", m.body.weight.data.t().contiguous().t()),
}


@pytest.mark.parametrize(("how", "kind"), [*((how, "fp32") for how in FINE), ("swap", "none"), ("clamps", "fp16")])
def test_what_arrives_or_was_to_change_nothing_is_not_reported(how, kind):
    assert reports(FINE[how], PLUGINS[kind](), batches=9) == []


def test_rows_that_are_put_back_after_a_small_step_keep_a_part_of_it():
    """Textual inversion: all rows of an embedding but one are to be what they were."""

    def fit(lr):
        module = Net(lr=lr)
        start = module.body.weight.detach().clone()

        def put_back(module):
            module.body.weight[:30] = start[:30]

        report = reports(put_back, module=module, batches=9)
        return report, (module.body.weight - start)[:30].abs().max()

    report, moved = fit(1e-5)
    assert "'body.weight'" in report[0]
    assert 0 < moved < 1e-3
    assert fit(0.0) == ([], 0)  # nothing to put back


def test_averages_that_are_looked_at_for_a_validation_are_no_edits():
    class Looks(Net):
        def validation_step(self, batch, _):
            pass

        def on_validation_start(self):
            self.kept = [param.detach().clone() for param in self.parameters()]
            with torch.no_grad():
                for param in self.parameters():
                    param.copy_(param.float() * 1.0001)

        def on_validation_end(self):
            with torch.no_grad():
                for param, value in zip(self.parameters(), self.kept, strict=True):
                    param.copy_(value)

    assert reports(module=Looks(), val_check_interval=1) == []


class Rolls(Net):
    """Every third step it goes back to what it kept, or takes over what it has kept and averaged."""

    dtype_kept = torch.bfloat16

    def on_train_start(self):
        self.kept = [param.detach().to(self.dtype_kept, copy=True) for param in self.parameters()]

    @torch.no_grad()
    def on_train_batch_end(self, *_):
        if self.global_step % 3 == 2:
            for param, kept in zip(self.parameters(), self.kept, strict=True):
                param.copy_(kept)


@pytest.mark.parametrize("kind", ["fp32", "split"])
def test_weights_put_back_from_16_bit_copies_are_reported(kind):
    def found(module):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            make_trainer(PLUGINS[kind]()).fit(module, loader(list(range(16))))
        return [str(each.message) for each in caught if "put back" in str(each.message)]

    (report,) = found(Rolls(lr=1e-2))
    for words in ("'body.weight'", "16-bit", "state_dict()", "fp32_weights(pl_module)"):
        assert words in report
    assert found(Rolls(lr=0.0)) == []

    class Remembers(Rolls):
        def on_train_start(self):
            self.kept = snapshot(self)

        def on_train_batch_end(self, *_):
            if self.global_step % 3 == 2:
                self.load_state_dict(self.kept)

    assert found(Remembers(lr=1e-2)) == []
    assert found(type("Wide", (Rolls,), {"dtype_kept": torch.float32})(lr=1e-2)) == []


HOOKS = [
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_train_epoch_end",
]


@pytest.mark.parametrize("hook", HOOKS)
def test_in_every_hook(hook):
    assert len(reports(LOST["data"], hook=hook)) == 1


def test_in_a_callback_and_after_a_validation_in_every_batch():
    class Decays(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            LOST["data"](pl_module)

    assert len(reports(callbacks=[Decays()])) == 1

    class Validates(Net):
        def validation_step(self, batch, _):
            assert not _get_current_dispatch_mode_stack()

    assert len(reports(LOST["data"], module=Validates(), val_check_interval=1)) == 1
    assert reports(module=Validates(), val_check_interval=1) == []


@pytest.mark.parametrize("steps", [1, 2])
def test_in_manual_optimization(steps):
    class Manual(Net):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            for step in range(steps):
                self.optimizers().zero_grad()
                self.manual_backward(self.loss(batch_idx))
                self.optimizers().step()
                if step == 0:
                    LOST["data"](self)

    assert len(reports(module=Manual())) == 1


def test_what_comes_every_so_often_shows_in_the_versions():
    """Every 7th step: none after 0, 1, 2, 4, 8, 16 ... steps, so that it takes the versions to look elsewhere."""
    assert len(reports(lambda m: LOST["mul_"](m) if m.global_step % 7 == 6 else None, batches=40)) == 1
    assert len(reports(lambda m: LOST["mul_"](m) if m.global_step == 6 else None, batches=40)) == 0


def test_with_accumulation_steps_are_counted_not_batches():
    def edit(module):
        if not module.trainer.fit_loop.epoch_loop._should_accumulate():
            LOST["data"](module)

    assert len(reports(edit, batches=9, accumulate_grad_batches=3)) == 1


@pytest.mark.parametrize("kind", ["fp32", "none"])
def test_looking_changes_nothing(kind, monkeypatch):
    def fit():
        module = Net()
        assert reports(FINE["large noise"], PLUGINS[kind](), module=module) == []
        return snapshot(module)

    torch.manual_seed(1)
    looked = fit()
    monkeypatch.setattr(EditWatch, "open_", lambda *args, **kwargs: None)
    torch.manual_seed(1)
    assert_same(looked, fit())


def test_modes_of_the_user_stay_in_order():
    """A counter that is entered at the start of a batch and left at its end, or the other way round."""

    class Counts(L.Callback):
        counts, counter = (), None

        def start(self):
            self.counter = FlopCounterMode(display=False)
            self.counter.__enter__()

        def end(self):
            if self.counter is not None:
                self.counter.__exit__(None, None, None)
                type(self).counts += (self.counter.get_total_flops(),)
                self.counter = None

    class Forward(Net):
        def training_step(self, batch, batch_idx):
            return self.body(torch.ones(1, 64)).float().sum()

    class Inside(Counts):
        def on_train_batch_start(self, *_):
            self.start()

        def on_train_batch_end(self, *_):
            self.end()

    class Outside(Counts):
        def on_train_batch_start(self, *_):
            self.end()

        def on_train_batch_end(self, *_):
            self.start()

        def on_train_end(self, *_):
            self.end()

    assert reports(callbacks=[Inside()], module=Forward()) == []
    assert reports(LOST["data"], callbacks=[Outside()], module=Forward()) != []
    assert len(set(Inside.counts)) == 1
    assert Inside.counts[0] > 0


def test_what_is_compiled_runs_compiled():
    graphs = []

    class Compiled(Net):
        def __init__(self):
            super().__init__()
            self.__dict__["compiled"] = torch.compile(self.body, backend=self.backend, fullgraph=True)

        def backend(self, graph, _):
            def run(*args):
                graphs.append(1)
                return graph(*args)

            return run

        def on_train_batch_end(self, *_):
            with torch.no_grad():
                self.compiled(torch.ones(3, 64))

    module = Compiled()
    make_trainer(MasterWeightPrecision("bf16")).fit(module, loader(list(range(5))))
    assert len(graphs) == 5


def test_an_error_in_a_hook_leaves_no_mode_behind():
    def fails(module):
        raise KeyError("of the user")

    with pytest.raises(KeyError, match="of the user"):
        reports(fails)
    assert not _get_current_dispatch_mode_stack()


def test_right_writes_in_every_batch_are_not_watched_for_ever(monkeypatch):
    """Of 40 batches with weights that are clipped by hand, the first that versions show and then 1, 2, 4, ... alone."""
    monkeypatch.setattr(edit_watch, "_ALL_FOLLOWED", 6)
    net = nn.Linear(2, 2, bias=False)
    masters = MasterWeights(net, {"weight": torch.bfloat16})
    masters.allocate()
    watch, watched = EditWatch(masters), []
    for step in range(1, 41):
        watch.begin_batch()
        watch.open_()
        if watch in _get_current_dispatch_mode_stack():
            watched.append(step - 1)
        with torch.no_grad():
            net.weight.clamp_(-0.5, 0.5)
        watch.close_()
        watch.stepped()
    assert watched == [0, 1, 2, 3, 4, 5, 6, 7, 8, 16, 32]
    assert list(watch.reports(net)) == []
