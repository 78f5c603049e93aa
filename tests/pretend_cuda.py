"""GPUs that are none: plain tensors on `cuda:0` whose memory is the host's, and a list of what made the host wait.

Every operation on such a tensor passes a dispatch mode, which does it on the CPU. So `tensor.device`, `Module.to`,
`param.data = ...`, views, autograd and autocast are torch's own, values are right, and what is missing on a real GPU is
missing here: operands on two devices, a kernel for CUDA. What it cannot show is the arithmetic of CUDA's kernels.

Torch asks the driver for devices when a backward begins; `preload` makes a library that answers. It has to be there
when the process starts, so tests run in a process of their own: `on_cuda.py`, started by `test_cuda.py`.
"""

import contextlib
import ctypes
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")
SOURCE = """
static signed char count = 0;
void pretend(int devices) { count = devices; }
signed char device_count(void) __asm__("_ZN3c104cuda12device_countEv");
signed char device_count(void) { return count; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { return *active = 0; }
"""
# The host reads a value, or a shape that depends on one.
READS = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive"}
READS |= {"bincount", "repeat_interleave"}
# What CUDA's kernels refuse and a CPU's do not (torch 2.11 and 2.14).
NOT_IN_BF16 = {"_amp_foreach_non_finite_check_and_unscale_"}
UNORDERED = {"histc", "put_", "kthvalue", "cumsum"}

_on_host: dict[int, torch.UntypedStorage] = {}  # by address; kept, so that no address is used twice
_on_gpu: dict[tuple[int, torch.device], torch.UntypedStorage] = {}
_current = [0]  # index of the GPU that is meant by "cuda"
_pinned: set[int] = set()
_random = [torch.Generator().get_state()]  # of the GPU's own generator
waits: list[str] = []  # what made the host wait for the device, and from where


def preload(folder: Path) -> Path:
    """Compile the library that has to be in `LD_PRELOAD`."""
    asks = (
        Path(torch.__file__).parent / "lib" / "libcaffe2_nvrtc.so"
    ).read_bytes()  # which is loaded as a whole or not
    others = {name.decode() for name in re.findall(rb"\0(cu[A-Z]\w+)", asks)} - {"cuDevicePrimaryCtxGetState"}
    source, library = folder / "driver.c", folder / "driver.so"
    source.write_text(SOURCE + "\n".join(f"int {name}(void) {{ return 0; }}" for name in sorted(others)))
    command = ["cc", "-w", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library), str(source)]
    subprocess.run(command, check=True)
    return library


def is_cuda(value) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cuda"


def gpu_of(device) -> torch.device:
    """With its index."""
    device = torch.device(device)
    return torch.device("cuda", _current[0]) if device.type == "cuda" and device.index is None else device


def to_gpu(value, gpu=GPU):
    """The same memory, said to be on the GPU."""
    if not isinstance(value, Tensor) or value.device.type != "cpu":
        return value
    storage = value.untyped_storage()
    address = storage.data_ptr()
    if (address, gpu) not in _on_gpu:
        _on_host[address] = storage
        _on_gpu[address, gpu] = torch._C._construct_storage_from_data_pointer(address, gpu, storage.nbytes())
    about = {"nbytes": storage.nbytes(), "data_ptr": address, "dtype": value.dtype, "device": gpu}
    about |= {"size": value.shape, "stride": value.stride(), "storage_offset": value.storage_offset()}
    return torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata(about, _on_gpu[address, gpu])


def to_host(value):
    """The same memory, as it is."""
    if not is_cuda(value):
        return value
    storage = _on_host.get(value.untyped_storage().data_ptr())
    if storage is None:
        assert not value.numel()
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    return torch.empty(0, dtype=value.dtype).set_(storage, value.storage_offset(), value.shape, value.stride())


class PretendedGpu(TorchDispatchMode):
    """Does on the CPU what is asked of the GPU."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if any(map(is_traceable_wrapper_subclass, tensors)):  # torchao's, which says what is done with its parts
            return NotImplemented
        device = gpu_of(kwargs["device"]) if kwargs.get("device") is not None else None
        gpu = next(
            (each for each in (device, *(tensor.device for tensor in tensors)) if each and each.type == "cuda"), GPU
        )
        name = func._schema.name.removeprefix("aten::") if isinstance(func, torch._ops.OpOverload) else ""
        if name == "is_pinned":
            return args[0].untyped_storage().data_ptr() in _pinned
        if name in ("pin_memory", "_pin_memory"):
            copy = args[0].clone()
            _pinned.add(copy.untyped_storage().data_ptr())
            return copy
        pin = kwargs.get("pin_memory")
        if not name or not (any(map(is_cuda, tensors)) or (device or CPU).type == "cuda" or pin):
            return func(*args, **kwargs)
        if name == "set_" and len(args) > 1 and isinstance(args[1], torch.UntypedStorage):
            return func(*args, **kwargs)  # of one on the GPU, as `deepcopy` makes it
        composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
        if composite and torch.is_inference_mode_enabled():  # there they come as they are called
            with self:
                return func.decompose(*args, **kwargs)
        self._check(func, name, args, kwargs, tensors, device)
        if name in ("_softmax", "_log_softmax") and args[2]:  # in half, with fp32 out of it
            args = (to_host(args[0]).float(), args[1], False)
        elif name in ("_softmax_backward_data", "_log_softmax_backward_data") and args[3] != args[0].dtype:
            with self:
                return func(*args[:3], args[0].dtype).to(args[3])
        elif name == "histc" and not args[0].is_floating_point():  # a CPU has none of whole numbers
            return to_gpu(func(to_host(args[0]).double(), *args[1:], **kwargs).to(args[0].dtype), gpu)
        if pin:
            kwargs["pin_memory"] = False
        if device is not None and device.type == "cuda":
            kwargs["device"] = CPU
        with _own_random_numbers(func, kwargs):
            result = func(*tree_map(to_host, args), **tree_map(to_host, kwargs))
        if pin:
            _pinned.add(result.untyped_storage().data_ptr())
        schema = func._schema
        if all(each.alias_info is not None and each.alias_info.is_write for each in schema.returns):  # or none at all
            given = [*args, *(kwargs.get(each.name) for each in schema.arguments[len(args) :])]
            written = [
                each
                for each, argument in zip(given, schema.arguments, strict=True)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
            return written[0] if len(schema.returns) == 1 else tuple(written) if schema.returns else None
        if pin or (device or GPU).type != "cuda":
            return result
        view = any(each.alias_info is not None for each in schema.returns)
        normal = torch.inference_mode(False) if view and not tensors[0].is_inference() else contextlib.nullcontext()
        with normal:  # a view is an inference tensor where what it looks at is one
            return tree_map(lambda value: to_gpu(value, gpu), result)

    @staticmethod
    def _check(func, name, args, kwargs, tensors, device) -> None:
        """What CUDA would refuse, or what would make the host wait."""
        if not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CUDA"):
            composite = ("CompositeExplicitAutograd", "CompositeImplicitAutograd")
            found = any(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key) for key in composite)
            assert found, f"{func} has no kernel for CUDA"
        bf16 = any(each.dtype == torch.bfloat16 for each in tensors)
        assert not (bf16 and name in NOT_IN_BF16), f"{func} is not implemented for bf16 on CUDA"
        floats = any(each.is_floating_point() for each in tensors)
        strict = torch.are_deterministic_algorithms_enabled()
        assert not (strict and floats and name in UNORDERED), f"{func} is not deterministic"
        if name in ("copy_", "_to_copy"):
            source, target = args[1 if name == "copy_" else 0], args[0]
            to = device or (target.device if name == "copy_" else source.device)
            at_once = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
            page = to.type == "cpu" and not (name == "copy_" and target.untyped_storage().data_ptr() in _pinned)
            if source.device.type != to.type and (at_once or page):
                _wait(f"{source.device.type} -> {to.type}")
            return
        if name == "_foreach_copy_":  # likewise, one by one
            if any(each.device.type == "cpu" for each in tensors):
                _wait("cpu -> cuda")
            return
        joins = name in ("cat", "stack")  # which take no numbers of the host's, either
        strays = [each for each in tensors if each.device.type == "cpu" and (each.dim() or joins)]
        assert not strays or name.startswith("index"), f"{func} has operands on the GPU and on the CPU"
        assert len({each.device for each in tensors if is_cuda(each)}) < 2, f"{func} has operands on two GPUs"
        masks = name.startswith("index") and [each for each in args[1] or () if each is not None]
        if name in READS or (masks and any(each.dtype == torch.bool for each in masks)):
            _wait(name)


def _wait(what: str) -> None:
    frame, names = sys._getframe(3), []
    while frame is not None and len(names) < 4:
        if "lightning" in (path := frame.f_code.co_filename) or "optim" in path:
            names.append(f"{Path(path).name}:{frame.f_code.co_name}")
        frame = frame.f_back
    waits.append(f"{what} from {' < '.join(names)}")


class _Event:
    def record(self, stream=None) -> None:
        pass

    def synchronize(self) -> None:
        waits.append("event")


class _Generator(torch.Generator):
    def __new__(cls, device="cpu"):
        made = super().__new__(cls)
        made.said = torch.device(device)
        return made

    @property
    def device(self):
        return gpu_of(self.said)


@contextlib.contextmanager
def _own_random_numbers(func, kwargs):
    """A GPU has a generator of its own, which `fork_rng` forks only where it is told to."""
    if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
        yield
        return
    host = torch.get_rng_state()
    torch.set_rng_state(_random[0])
    try:
        yield
    finally:
        _random[0] = torch.get_rng_state()
        torch.set_rng_state(host)


def _set_rng_state(state, device=None) -> None:
    _random[0] = state.clone()


def _seed(seed) -> None:
    _random[0] = torch._C.Generator().manual_seed(seed).get_state()


class _Storage:
    """What torch does with storages without a dispatcher: to save, load and copy tensors."""

    @staticmethod
    def cpu(storage):
        if storage.device.type != "cuda":
            return storage
        _wait("cuda -> cpu")
        return _on_host[storage.data_ptr()].clone() if storage.nbytes() else torch.UntypedStorage(0)

    @staticmethod
    def clone(storage, clone=torch.UntypedStorage.clone):
        if storage.device.type != "cuda":
            return clone(storage)
        return _Storage.to(clone(_on_host[storage.data_ptr()]), device=storage.device)

    @staticmethod
    def to(storage, *, device, non_blocking=False, to=torch.UntypedStorage.to):
        if torch.device(device).type != "cuda":
            return to(_Storage.cpu(storage), device=device)
        return to_gpu(torch.empty(0, dtype=torch.uint8).set_(storage), gpu_of(device)).untyped_storage()


def _made_on(make):
    """`torch.tensor` copies to a device behind the back of dispatch modes."""

    def made(data, *args, device=None, **kwargs):
        if device is None or torch.device(device).type != "cuda":
            return make(data, *args, device=device, **kwargs)
        return make(data, *args, **kwargs).to(device)

    return made


def _new_tensor(like, data, *, dtype=None, device=None, requires_grad=False):
    made = torch.tensor(data, dtype=dtype or like.dtype, device=device or like.device)
    return made.requires_grad_(requires_grad)


@contextlib.contextmanager
def _other_modes_disabled(disable=_python_dispatch._disable_current_modes):
    with disable() as modes, PretendedGpu():
        yield modes


@contextlib.contextmanager
def pretend(library: str, capability: tuple[int, int] = (9, 0), devices: int = 1):
    """One or more GPUs, for the length of the context."""
    torch._C._ensureCUDADeviceGuardSet()  # one that does nothing, as there is no GPU
    ctypes.CDLL(library).pretend(127)
    about = SimpleNamespace(name="none", major=capability[0], minor=capability[1], total_memory=2**36)
    modes = _python_dispatch._get_current_dispatch_mode_stack
    replaced = {
        "torch.cuda._lazy_init": lambda: None,
        "torch.cuda.is_available": lambda: True,
        "torch.cuda.is_initialized": lambda: True,
        "torch.cuda.device_count": lambda: devices,
        "torch.cuda.current_device": lambda: _current[0],
        "torch.cuda.set_device": lambda device: _current.__setitem__(0, torch.device(device).index or 0),
        "torch.cuda.get_device_capability": lambda device=None: capability,
        "torch.cuda.get_device_name": lambda device=None: about.name,
        "torch.cuda.get_device_properties": lambda device=None: about,
        "torch.cuda.is_bf16_supported": lambda including_emulation=True: including_emulation or capability[0] >= 8,
        "torch.cuda.is_current_stream_capturing": lambda: False,
        "torch.cuda.current_stream": lambda device=None: mock.MagicMock(),
        "torch.cuda.Event": _Event,
        "torch.cuda.synchronize": lambda device=None: waits.append("synchronize"),
        "torch.cuda.empty_cache": lambda: None,
        "torch.cuda.get_rng_state": lambda device=None: _random[0].clone(),
        "torch.cuda.set_rng_state": _set_rng_state,
        "torch.cuda.manual_seed": _seed,
        "torch.cuda.manual_seed_all": _seed,
        "torch.Generator": _Generator,
        "torch.UntypedStorage.cpu": _Storage.cpu,
        "torch.UntypedStorage.clone": _Storage.clone,
        "torch.UntypedStorage.to": _Storage.to,
        "torch.tensor": _made_on(torch.tensor),
        "torch.Tensor.new_tensor": _new_tensor,
        "torch.as_tensor": _made_on(torch.as_tensor),
        # Which modes there are is asked to find those of users; this is none.
        "lightning_mixprec.apart._disable_current_modes": _other_modes_disabled,
        "lightning_mixprec.edit_watch._get_current_dispatch_mode_stack": lambda: [
            mode for mode in modes() if not isinstance(mode, PretendedGpu)
        ],
    }
    with contextlib.ExitStack() as stack:
        for name, value in replaced.items():
            stack.enter_context(mock.patch(name, value))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(torch.backends.cudnn.flags(enabled=False))  # its operations have no other kernels
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))  # nor have these
        stack.enter_context(PretendedGpu())
        waits.clear()
        _current[0] = 0
        yield
