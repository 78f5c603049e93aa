"""What a policy means for a model."""

import math
import re

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from reference import REPARAMETRISATIONS, TinyNet
from torch import nn

from lightning_mixprec import PrecisionPolicy
from lightning_mixprec.layers import Fp32Layer, NormLayer, swap_, swap_layers_
from lightning_mixprec.policy import COMPUTE_DTYPES

BF16, FP32 = torch.bfloat16, torch.float32


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = TinyNet()
        self.pos_embed = nn.Parameter(torch.zeros(4))
        self.gain = nn.Parameter(torch.ones(4))


def test_defaults_follow_practice():
    plan = PrecisionPolicy("bf16").resolve(Wrapped())
    assert dict(plan) == {
        "": BF16,
        "net.time_embedding": FP32,
        "net.conv_in": BF16,
        "net.norm": FP32,
        "net.proj": BF16,
        "net.conv_out": FP32,
    }
    assert plan.kinds["net.norm"] == "norm"
    assert plan.kinds["net.conv_out"] == "fp32"
    assert plan.parameters["pos_embed"] == FP32
    assert plan.parameters["gain"] == BF16


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        (["time_embed", "label_emb"], ["out"]),  # ADM, Stable Diffusion
        (["map_noise", "map_label", "map_layer0", "map_layer1"], ["out_norm", "out_conv"]),  # EDM
        (["emb_noise", "emb_label"], ["out_conv"]),  # EDM2
        (["t_embedder", "y_embedder"], ["final_layer"]),  # DiT
        (["time_embedding", "class_embedding"], ["conv_norm_out", "conv_out"]),  # diffusers' U-Nets
        (["time_mlp"], ["final_conv"]),  # denoising-diffusion-pytorch
        (["time_embedding", "pos_embed"], ["norm_out", "proj_out"]),  # diffusers' transformers
    ],
)
def test_defaults_know_the_names_that_are_in_use(inputs, outputs):
    kept = {name: nn.Linear(2, 2) for name in (*inputs, *outputs)}
    model = nn.ModuleDict({"model": nn.ModuleDict({"x_embedder": nn.Linear(2, 2), **kept})})
    model["model"].add_module("blocks", nn.ModuleList([nn.ModuleDict({name: nn.Linear(2, 2) for name in outputs})]))
    plan = PrecisionPolicy("bf16").resolve(model)
    fp32 = {name for name, kind in plan.kinds.items() if kind == "fp32"}
    assert fp32 == {f"model.{name}" for name in kept}


class GaussianFourierProjection(nn.Module):
    """Sines of a noise level by a matrix product, as NCSN++ and k-diffusion have them: [B] -> [B, 16]."""

    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.randn(8, 1) * 16)

    def forward(self, sigma):
        angle = sigma[:, None] @ self.weight.T
        return torch.cat([angle.sin(), angle.cos()], dim=1)


class Features(GaussianFourierProjection):
    """The same, of which the name of the class says nothing."""


class SinusoidalPosEmb(nn.Module):
    pass


class TimestepEmbedder(nn.Sequential):
    pass


class TimestepEmbedSequential(nn.Sequential):
    """ADM's, which holds the blocks of a U-Net."""


class FourierBlock(nn.Sequential):
    """Of a neural operator."""


@pytest.mark.parametrize(
    "module",
    [GaussianFourierProjection(), SinusoidalPosEmb(), TimestepEmbedder(nn.Linear(8, 4), nn.Linear(4, 4))],
)
def test_what_embeds_a_number_is_known_by_its_class(module):
    blocks = nn.ModuleList([nn.ModuleDict({"conditioning": module})])
    assert PrecisionPolicy("bf16").resolve(nn.ModuleDict({"blocks": blocks})).kinds["blocks.0.conditioning"] == "fp32"


@pytest.mark.parametrize(
    "name",
    ["fourier", "map_fourier", "gfp", "time_emb", "sigma_emb", "noise_level_emb", "time_proj", "t_proj", "time_in",
     "timestep_features", "time_features", "time_cond"],
)  # fmt: skip
def test_what_embeds_a_number_is_known_by_its_name(name):
    for module in (Features(), nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 4)), nn.Linear(1, 4)):
        net = nn.ModuleDict({"net": nn.ModuleDict({name: module, "patch_embed": nn.Linear(2, 2)})})
        kinds = PrecisionPolicy("bf16").resolve(net).kinds
        assert kinds[f"net.{name}"] == "fp32"
        assert kinds["net.patch_embed"] == "compute"
        assert PrecisionPolicy("bf16", fp32_defaults=False).resolve(net).kinds[f"net.{name}"] == "compute"


def test_large_layers_and_projections_inside_blocks_are_not_embeddings():
    block = nn.ModuleDict({"time_emb": nn.Linear(8, 16), "time_proj": nn.Sequential(nn.SiLU(), nn.Linear(8, 16))})
    model = nn.ModuleDict(
        {
            "time_proj": nn.Linear(64, 384),  # Wan's modulation
            "time_emb_proj": nn.Linear(8, 16),
            "down": TimestepEmbedSequential(nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 3)),
            "operator": FourierBlock(nn.Conv1d(2, 2, 3)),
            "fourier_mixer": nn.Sequential(*(nn.Linear(4, 4) for _ in range(6))),
            "time_conv": nn.Conv3d(1, 1, 3),
            "text_encoder": nn.Embedding(5, 4),
            "middle": block,
            "blocks": nn.ModuleList([nn.ModuleDict({"time_in": Features()})]),
        }
    )
    assert set(PrecisionPolicy("bf16").resolve(model).kinds.values()) == {"compute"}


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_noise_levels_are_told_apart_by_features_of_a_matrix_product(compute):
    """Against float64 in plain loops; 16 bits of an angle of hundreds are off by more than a radian."""
    torch.manual_seed(0)
    net = nn.ModuleDict({"fourier": Features(), "out": nn.Linear(16, 1)})
    sigmas = torch.logspace(-2, 1.9, 50)
    swap_layers_(net, PrecisionPolicy(compute).resolve(net).kinds, "cpu", COMPUTE_DTYPES[compute])
    with torch.autocast("cpu", COMPUTE_DTYPES[compute]):
        found = net["fourier"](sigmas)
    for row, sigma in zip(found.tolist(), sigmas.tolist(), strict=True):
        for column, weight in enumerate(net["fourier"].weight.flatten().tolist()):
            assert row[column] == pytest.approx(math.sin(sigma * weight), abs=5e-4)
            assert row[8 + column] == pytest.approx(math.cos(sigma * weight), abs=5e-4)


def test_defaults_can_be_dropped_but_norms_stay():
    plan = PrecisionPolicy("bf16", fp32_defaults=False).resolve(Wrapped())
    assert plan["net.time_embedding"] == plan["net.conv_out"] == BF16
    assert plan.kinds["net.norm"] == "norm"


@pytest.mark.parametrize("entry", ["net.proj", "proj", "*.proj", "net.pro?", "*proj*"])
def test_globs_on_qualified_names_may_leave_out_leading_parts(entry):
    plan = PrecisionPolicy("bf16", fp32=[entry]).resolve(Wrapped())
    assert plan["net.proj"] == FP32
    assert plan["net.conv_in"] == BF16


@pytest.mark.parametrize("entry", [nn.Conv2d, "Conv2d", "Conv*", "_ConvNd"])
def test_types_and_class_names(entry):
    plan = PrecisionPolicy("bf16", fp32=[entry]).resolve(Wrapped())
    assert plan["net.conv_in"] == FP32
    assert plan["net.proj"] == BF16


def test_a_container_covers_what_lies_below_it():
    plan = PrecisionPolicy("fp16", fp32=["net"]).resolve(Wrapped())
    assert set(plan.parameters.values()) == {FP32, torch.float16}
    assert plan.parameters["gain"] == torch.float16
    assert plan.kinds["net.norm"] == "fp32"


def test_explicit_norm_entry_makes_its_activations_fp32_too():
    assert PrecisionPolicy("fp16", fp32=[nn.GroupNorm]).resolve(TinyNet()).kinds["norm"] == "fp32"


def test_parameters_can_be_named():
    """Stored in fp32, by themselves: the layer computes as before, and the table says so."""
    plan = PrecisionPolicy("bf16", fp32=["gain", "proj.bias"]).resolve(Wrapped())
    assert plan.parameters["gain"] == plan.parameters["net.proj.bias"] == FP32
    assert plan.parameters["net.proj.weight"] == plan["net.proj"] == BF16
    assert plan.kinds["net.proj"] == "compute"
    rows = {line.split()[0]: line for line in str(plan).splitlines()}
    assert rows["net.proj"].endswith("compute; bias in float32, fp32 entry 'proj.bias'")
    assert rows["(root)"].endswith(
        "compute; pos_embed in float32, default: embedding; gain in float32, fp32 entry 'gain'"
    )


@pytest.mark.parametrize("name", ["pos_embed", "pos_embedding", "class_embedding"])
def test_embeddings_that_are_bare_parameters_stay_fp32(name):
    """DiT's and ViT's tables belong to the network itself; its layers are not what they name."""
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(2, 2)])})
    model.register_parameter(name, nn.Parameter(torch.zeros(3, 2)))
    plan = PrecisionPolicy("bf16").resolve(nn.ModuleDict({"net": model}))
    assert plan.parameters == {f"net.{name}": FP32, "net.blocks.0.weight": BF16, "net.blocks.0.bias": BF16}
    assert plan.kinds["net"] == "compute"
    dropped = PrecisionPolicy("bf16", fp32_defaults=False).resolve(model)
    assert set(dropped.parameters.values()) == {BF16}


def test_parameters_in_lists_can_be_named():
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.ParameterList([torch.zeros(2), torch.zeros(2)])
            self.scales = nn.ParameterDict({"a": torch.zeros(2)})

    expected = {"tokens.0": BF16, "tokens.1": FP32, "scales.a": FP32}
    assert PrecisionPolicy("bf16", fp32=["tokens.1", "scales"]).resolve(Tokens()).parameters == expected


@pytest.mark.parametrize("entry", ["heads.out.*", "out.*", "heads.*"])
def test_all_below_a_single_layer_is_that_layer(entry):
    """`time_embedding.*` means the same for one layer as for several: computation, not storage alone."""
    model = nn.ModuleDict({"heads": nn.ModuleDict({"out": nn.Linear(2, 2)}), "body": nn.Linear(2, 2)})
    plan = PrecisionPolicy("bf16", fp32=[entry]).resolve(model)
    assert plan.kinds["heads.out"] == "fp32"
    assert plan.kinds["body"] == "compute"


def test_shared_parameters_are_fp32_if_one_owner_is():
    model = nn.ModuleDict({"embed": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)})
    model["head"].weight = model["embed"].weight
    plan = PrecisionPolicy("bf16", fp32=["head"]).resolve(model)
    assert plan.parameters == {"embed.weight": FP32, "head.weight": FP32}
    assert "shared with 'head'" in str(plan)


@pytest.mark.parametrize("entry", ["first", "second"])
def test_a_module_in_two_places_has_the_most_precise_kind(entry):
    shared = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    model = nn.ModuleDict({"first": nn.Sequential(shared), "second": nn.Sequential(shared), "third": nn.Linear(2, 2)})
    plan = PrecisionPolicy("bf16", fp32=[entry]).resolve(model)
    for place in ("first", "second"):
        assert plan.kinds[f"{place}.0.0"] == plan.kinds[f"{place}.0.1"] == "fp32"
    assert plan.kinds["third"] == "compute"


def test_output_names_inside_numbered_blocks_are_not_the_output():
    """Embeddings are, wherever they stand: DiT in diffusers keeps one in every block."""
    blocks = nn.ModuleList([nn.ModuleDict({"proj_out": nn.Linear(2, 2), "timestep_embedder": nn.Linear(2, 2)})])
    model = nn.ModuleDict({"blocks": blocks, "proj_out": nn.Linear(2, 2)})
    plan = PrecisionPolicy("bf16").resolve(model)
    assert plan["blocks.0.proj_out"] == BF16
    assert plan["proj_out"] == plan["blocks.0.timestep_embedder"] == FP32


@pytest.mark.parametrize("entry", ["attn.out_proj", "*proj", nn.Linear, "attn.*"])
def test_the_output_projection_of_an_attention_stands_for_the_attention(entry):
    """Torch's attention computes with its weights and never calls it."""
    model = nn.ModuleDict({"attn": nn.MultiheadAttention(4, 2), "other": nn.MultiheadAttention(4, 2).out_proj})
    assert PrecisionPolicy("bf16", fp32=[entry]).resolve(model).kinds["attn"] == "fp32"
    assert PrecisionPolicy("bf16", fp32=["other"]).resolve(model).kinds["attn"] == "compute"


def test_foreign_norms_are_recognised_but_not_parametrizations():
    class MyRMSNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

    model = nn.Sequential(MyRMSNorm(), nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2)))
    kinds = PrecisionPolicy("bf16").resolve(model).kinds
    assert kinds["0"] == "norm"
    assert "norm" not in {kind for name, kind in kinds.items() if name.startswith("1")}


def test_names_that_merely_sound_like_norms_are_left_alone():
    class Denormalize(nn.Module):
        def forward(self, x):
            return x * 1000

    class GroupNorm32(nn.Module):
        pass

    kinds = PrecisionPolicy("bf16").resolve(nn.Sequential(Denormalize(), GroupNorm32())).kinds
    assert kinds == {"0": "compute", "1": "norm"}


@pytest.mark.parametrize("reparametrise", REPARAMETRISATIONS)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated.*")
def test_reparametrised_weights_stay_fp32(reparametrise):
    """T22: power iterations and matrix functions need it."""
    model = nn.Sequential(reparametrise(nn.Linear(4, 4)), nn.Linear(4, 4))
    parameters = PrecisionPolicy("bf16").resolve(model).parameters
    made_up = [name for name in parameters if name.startswith("0.") and name != "0.bias"]
    assert made_up
    assert {parameters[name] for name in made_up} == {FP32}
    assert parameters["1.weight"] == BF16


def test_lazy_parameters_are_refused_with_the_remedy():
    with pytest.raises(ValueError, match=r"'0.weight' has no shape yet.*configure_model"):
        PrecisionPolicy("bf16").resolve(nn.Sequential(nn.LazyLinear(3)))


def test_modules_without_a_length_are_asked_nothing():
    """A compiled child has no len(); its truth value must not be taken."""
    compiled = torch.compile(TinyNet())
    assert PrecisionPolicy("bf16").resolve(nn.ModuleDict({"net": compiled}))["net._orig_mod.proj"] == BF16


def test_the_table_shows_layer_dtype_reason_and_parameters():
    lines = str(PrecisionPolicy("bf16", fp32=["proj"]).resolve(TinyNet())).splitlines()
    rows = {line.split()[0]: line for line in lines}
    assert rows["proj"].split(maxsplit=4)[1:] == ["Linear", "float32", "72", "fp32 entry 'proj'"]
    assert rows["norm"].endswith("default: normalisation")
    assert rows["conv_out"].endswith("default: output layer")


@pytest.mark.parametrize(
    ("entry", "near"),
    [
        ("time_embeding", "time_embedding"),
        ("GroupNrm", "GroupNorm"),
        ("net.prj", "net.proj"),
        ("groupnorm", "'GroupNorm'"),
        ("CONV_OUT", "'conv_out'"),
        ("nn.GroupNorm", "'GroupNorm'"),
        ("time_embeding.*", "time_"),
    ],
)
def test_an_entry_that_matches_nothing_shows_near_misses(entry, near):
    with pytest.raises(ValueError, match=rf"(?s){entry[:8]}.*Did you mean.*{near}"):
        PrecisionPolicy("bf16", fp32=[entry]).resolve(Wrapped())


def test_a_model_that_is_being_trained_resolves_as_before():
    model = Wrapped()
    policy = PrecisionPolicy("bf16", fp32=["Conv*"])
    before = policy.resolve(model)
    swap_(model.net.norm, NormLayer, "cpu", BF16)
    swap_(model.net.conv_in, Fp32Layer, "cpu", BF16)
    assert str(policy.resolve(model)) == str(before)
    with pytest.raises(ValueError, match="matches no module"):
        PrecisionPolicy("bf16", fp32=["*Layer"]).resolve(model)


def test_a_type_that_matches_nothing_lists_the_types():
    with pytest.raises(ValueError, match=r"LSTM.*Conv2d.*GroupNorm.*Linear"):
        PrecisionPolicy("bf16", fp32=[nn.LSTM]).resolve(TinyNet())


@pytest.mark.parametrize(
    ("fp32", "remedy"),
    [
        ("GroupNorm", r"Write fp32=\['GroupNorm'\]"),
        (nn.GroupNorm, r"Write fp32=\[GroupNorm\]"),
        ([3], "Write '3' for the layer of that name"),  # what Hydra makes of fp32=[3]
        ([""], "class or a name"),
        ([None], "class or a name"),
        (5, "must be a list"),
    ],
)
def test_entries_of_the_wrong_form_are_refused(fp32, remedy):
    with pytest.raises(ValueError, match=rf"fp32.*{remedy}"):
        PrecisionPolicy("bf16", fp32=fp32)


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        ("[time_embedding.*,GroupNorm]", {"net.time_embedding", "net.norm"}),
        ("[*.proj,net.conv_i?]", {"net.proj", "net.conv_in"}),
        ("['net.[pn]*']", {"net.proj", "net.norm"}),
        ("[_ConvNd]", {"net.conv_in", "net.conv_out"}),
    ],
)
def test_entries_can_be_written_on_hydras_command_line(written, kept):
    override = OverridesParser.create().parse_override(f"precision.policy.fp32={written}")
    entries = OmegaConf.create({"fp32": override.value()}).fp32
    plan = PrecisionPolicy("bf16", fp32=entries, fp32_defaults=False).resolve(Wrapped())
    assert {name for name, kind in plan.kinds.items() if kind == "fp32"} == kept


def test_unknown_compute_suggests():
    with pytest.raises(ValueError, match=r"'bf16-mixed'.*'fp32', 'bf16', 'fp16'.*Did you mean 'bf16'"):
        PrecisionPolicy("bf16-mixed")


def test_double_and_complex_parameters_are_refused_by_name_unless_kept():
    """Ruling 10."""
    model = nn.Sequential(nn.Linear(2, 2).double(), nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"'0.weight'.*float64.*fp32=\['0.weight'\]"):
        PrecisionPolicy("bf16").resolve(model)
    assert PrecisionPolicy("bf16", fp32=["0"]).resolve(model).parameters["0.weight"] == torch.float64


def test_fp32_policy_leaves_everything_alone():
    plan = PrecisionPolicy("fp32").resolve(TinyNet())
    assert set(plan.kinds.values()) == {"compute"}
    assert set(plan.values()) == {FP32}


def test_a_plan_shows_equal_blocks_once_and_knows_them_all():
    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.norm = nn.LayerNorm(width)
            self.inner = nn.ModuleList([nn.Linear(width, width), nn.Linear(width, width)])

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Linear(1, 4)
            self.blocks = nn.ModuleList([*(Block(4) for _ in range(12)), Block(8)])
            self.out = nn.Linear(4, 1)

    model = Net()
    plan = PrecisionPolicy("bf16", fp32_defaults=False).resolve(model)
    names = [line.split("  ")[0] for line in str(plan).splitlines()]
    tail = ["blocks.12.norm", "blocks.12.inner.0-1 x2", "out"]
    assert names == ["layer", "stem", "blocks.0-11.norm x12", "blocks.0-11.inner.0-1 x24", *tail]
    assert len(plan) == 2 + 13 * 3
    # What differs in anything stands by itself.
    apart = PrecisionPolicy("bf16", fp32=["blocks.3", "blocks.7.inner.1"], fp32_defaults=False).resolve(model)
    rows = {line.split("  ")[0]: line for line in str(apart).splitlines()}
    assert "float32" in rows["blocks.3.inner.0-1 x2"]
    assert "float32" in rows["blocks.7.inner.1"]
    assert "bfloat16" in rows["blocks.7.inner.0"]
    assert {"blocks.0-2.norm x3", "blocks.4-6.inner.0-1 x6", "blocks.8-11.norm x4"} <= rows.keys()
    multiples = [re.search(r" x(\d+)$", name) for name in rows if name != "layer"]
    assert sum(int(found[1]) if found else 1 for found in multiples) == len(apart)
