"""Models of other libraries, small and randomly initialised from their configurations: nothing is downloaded.

Each entry builds the model, the same at every call, and says what its loss is. Libraries are imported where used.
"""

import importlib
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

F64 = torch.float64


@dataclass(frozen=True)
class Entry:
    """A model: who wrote it, how it is built, its loss on a fixed batch, and settings for the server."""

    library: str
    name: str
    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module], Tensor]
    settings: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """On which axes the inputs of a weight lie, by the end of its name, where its layer is none of PyTorch's."""
    find: bool = False
    """Whether `dbcl.model.find_layers` tells the server of the layers."""
    dtype: torch.dtype | None = F64

    def make(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build().to(self.dtype).train()


class Named(type):
    """A class with every attribute that one asks for: the attribute's name."""

    def __getattr__(cls, name: str) -> str:
        return name


class Pretended(types.ModuleType):
    """A package in which every name is such a class."""

    __path__: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Named(name, (), {})


class Pretend:
    """Finds torchvision where there is none, so that libraries which only read pictures with it can be imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name.partition(".")[0] == "torchvision" else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return Pretended(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


def import_without_torchvision(library: str) -> Any:
    finder: Any = Pretend()
    sys.meta_path.append(finder)  # the last one: asked only where torchvision is missing
    try:
        return importlib.import_module(library)
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name, module in sys.modules.items() if isinstance(module, Pretended)]:
            del sys.modules[name]


def fixed(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7), dtype=F64)


def tokens(*shape: int, below: int = 30) -> Tensor:
    return torch.randint(1, below, shape, generator=torch.Generator().manual_seed(7))


def squares(*arguments: Tensor, **named: Tensor) -> Callable[[nn.Module], Tensor]:
    """The mean square of everything floating that a model gives for some arguments."""

    def loss(model: nn.Module) -> Tensor:
        found = list(_tensors(model(*arguments, **named)))
        return torch.stack([tensor.square().mean() for tensor in found]).sum()

    return loss


def _tensors(value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def own_loss(**named: Tensor) -> Callable[[nn.Module], Tensor]:
    """The loss that a model of transformers computes from labels."""
    return lambda model: model(**named).loss


TEXT = {"input_ids": tokens(2, 8), "labels": tokens(2, 8)}
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 32}


def hugging(config: str, model: str, **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        library = importlib.import_module("transformers")
        made: nn.Module = getattr(library, model)(getattr(library, config)(**settings))
        return made

    return build


def timm_model(name: str, **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        timm = import_without_torchvision("timm")
        made: nn.Module = timm.create_model(name, pretrained=False, num_classes=5, **settings)
        return made

    return build


def classes(*shape: int) -> Callable[[nn.Module], Tensor]:
    x, y = fixed(*shape), torch.arange(shape[0]) % 5
    return lambda model: F.cross_entropy(model(x), y)


GPT2 = {
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "vocab_size": 32,
    "n_positions": 16,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
CONV1D = {f"{name}.weight": (0,) for name in ("c_attn", "attn.c_proj", "c_fc", "mlp.c_proj", "c_attn.base_layer")}
T5 = {
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 2,
    "vocab_size": 32,
    "decoder_start_token_id": 0,
}
LLAMA = {**SMALL, "num_key_value_heads": 1, "max_position_embeddings": 16}
EXPERTS = {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "experts_implementation": "eager"}
VIT = {k: v for k, v in SMALL.items() if k != "vocab_size"} | {"image_size": 16, "patch_size": 4, "num_labels": 5}
PICTURES = {"pixel_values": fixed(2, 3, 16, 16), "labels": torch.tensor([1, 2])}

TRANSFORMERS = [
    Entry(
        "transformers",
        "GPT-2 (Conv1D, tied head)",
        hugging("GPT2Config", "GPT2LMHeadModel", **GPT2),
        own_loss(**TEXT),
        {},
        CONV1D,
    ),
    Entry("transformers", "BERT, masked words", hugging("BertConfig", "BertForMaskedLM", **SMALL), own_loss(**TEXT)),
    Entry(
        "transformers",
        "RoBERTa",
        hugging("RobertaConfig", "RobertaForMaskedLM", **SMALL, pad_token_id=0),
        own_loss(**TEXT),
    ),
    Entry(
        "transformers",
        "ALBERT (one layer used twice)",
        hugging("AlbertConfig", "AlbertForMaskedLM", **SMALL, embedding_size=8),
        own_loss(**TEXT),
    ),
    Entry("transformers", "T5 (tied)", hugging("T5Config", "T5ForConditionalGeneration", **T5), own_loss(**TEXT)),
    Entry("transformers", "Llama", hugging("LlamaConfig", "LlamaForCausalLM", **LLAMA), own_loss(**TEXT)),
    Entry("transformers", "Qwen2", hugging("Qwen2Config", "Qwen2ForCausalLM", **LLAMA), own_loss(**TEXT)),
    Entry(
        "transformers",
        "Mixtral, its experts left out",
        hugging("MixtralConfig", "MixtralForCausalLM", **EXPERTS),
        own_loss(**TEXT),
    ),
    Entry(
        "transformers",
        "Mixtral, its experts told in a line",
        hugging("MixtralConfig", "MixtralForCausalLM", **EXPERTS),
        own_loss(**TEXT),
        {"layers": {"*.experts.*_proj": -1}},
        {"experts.gate_up_proj": (2,), "experts.down_proj": (2,)},
    ),
    Entry(
        "transformers",
        "Mixtral, its experts found by find_layers",
        hugging("MixtralConfig", "MixtralForCausalLM", **EXPERTS),
        own_loss(**TEXT),
        inputs={"mlp.gate.weight": (1,), "experts.gate_up_proj": (2,), "experts.down_proj": (2,)},
        find=True,
    ),
    Entry("transformers", "ViT", hugging("ViTConfig", "ViTForImageClassification", **VIT), own_loss(**PICTURES)),
    Entry(
        "transformers",
        "Wav2Vec2 (weight norm inside)",
        hugging(
            "Wav2Vec2Config",
            "Wav2Vec2ForSequenceClassification",
            **SMALL,
            conv_dim=(8, 8),
            conv_stride=(4, 4),
            conv_kernel=(8, 4),
            num_feat_extract_layers=2,
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2,
            classifier_proj_size=8,
            mask_time_prob=0.0,
            layerdrop=0.0,
        ),
        own_loss(input_values=fixed(2, 400), labels=torch.tensor([0, 1])),
    ),
    Entry(
        "transformers",
        "Mamba",
        hugging("MambaConfig", "MambaForCausalLM", hidden_size=16, num_hidden_layers=2, vocab_size=32, state_size=4),
        own_loss(**TEXT),
    ),
]

TIMM = [
    Entry("timm", "resnet10t", timm_model("resnet10t"), classes(4, 3, 32, 32)),
    Entry(
        "timm",
        "vit_tiny_patch16_224 at 32 pixels",
        timm_model("vit_tiny_patch16_224", img_size=32, depth=2),
        classes(4, 3, 32, 32),
    ),
    Entry("timm", "convnext_atto", timm_model("convnext_atto"), classes(2, 3, 32, 32)),
    Entry("timm", "efficientnet_lite0", timm_model("efficientnet_lite0"), classes(4, 3, 32, 32)),
    Entry("timm", "mobilenetv3_small_050", timm_model("mobilenetv3_small_050"), classes(4, 3, 32, 32)),
]


def lora(build: Callable[[], nn.Module], *targets: str, **settings: Any) -> Callable[[], nn.Module]:
    def adapted() -> nn.Module:
        peft = importlib.import_module("peft")
        made: nn.Module = peft.get_peft_model(
            build(), peft.LoraConfig(**{"r": 4, "target_modules": list(targets), **settings})
        )
        return made

    return adapted


PEFT = [
    Entry(
        "peft",
        "LoRA on GPT-2",
        lora(hugging("GPT2Config", "GPT2LMHeadModel", **GPT2), "c_attn", fan_in_fan_out=True),
        own_loss(**TEXT),
        {"coverage": "all"},
    ),
    Entry(
        "peft",
        "LoRA on BERT, its classifier trained too",
        lora(
            hugging("BertConfig", "BertForSequenceClassification", **SMALL),
            "query",
            "value",
            modules_to_save=["classifier"],
        ),
        own_loss(input_ids=TEXT["input_ids"], labels=torch.tensor([0, 1])),
    ),
    Entry(
        "peft",
        "DoRA on Llama",
        lora(hugging("LlamaConfig", "LlamaForCausalLM", **LLAMA), "q_proj", "v_proj", use_dora=True),
        own_loss(**TEXT),
        {"coverage": "all"},
    ),
]

EDGES = torch.tensor([[0, 1, 1, 2, 3, 4, 5, 0], [1, 0, 2, 1, 4, 3, 0, 5]])


def geometric(name: str, **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        made: nn.Module = getattr(importlib.import_module("torch_geometric.nn"), name)(8, 12, 2, 3, **settings)
        return made

    return build


GEOMETRIC = [
    Entry("torch-geometric", "GCN", geometric("GCN"), squares(fixed(6, 8), EDGES), {}, {"weight": (1,)}),
    Entry("torch-geometric", "GAT", geometric("GAT", heads=2), squares(fixed(6, 8), EDGES), {}, {"weight": (1,)}),
    Entry(
        "torch-geometric",
        "GATv2",
        geometric("GAT", heads=2, v2=True),
        squares(fixed(6, 8), EDGES),
        {},
        {"weight": (1,)},
    ),
    Entry("torch-geometric", "GraphSAGE", geometric("GraphSAGE"), squares(fixed(6, 8), EDGES), {}, {"weight": (1,)}),
    Entry("torch-geometric", "GIN", geometric("GIN"), squares(fixed(6, 8), EDGES), {}, {"weight": (1,)}),
]


def segmentation(name: str, **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        library = import_without_torchvision("segmentation_models_pytorch")
        made: nn.Module = getattr(library, name)("tu-resnet10t", encoder_weights=None, classes=2, **settings)
        return made

    return build


class Relations(nn.Module):
    """A graph with two kinds of edges and two kinds of nodes."""

    def __init__(self) -> None:
        super().__init__()
        layers = importlib.import_module("torch_geometric.nn")
        self.nodes = layers.HeteroLinear(8, 12, num_types=2)
        self.edges = layers.RGCNConv(12, 10, num_relations=2)
        self.out = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        kinds = torch.tensor([0, 0, 0, 1, 1, 1])
        hidden = self.edges(self.nodes(x, kinds).tanh(), EDGES, torch.arange(8) % 2)
        made: Tensor = self.out(hidden.tanh())
        return made


GEOMETRIC.append(
    Entry(
        "torch-geometric",
        "HeteroLinear and RGCN, found by find_layers",
        Relations,
        squares(fixed(6, 8)),
        inputs={"nodes.weight": (1,), "edges.weight": (1,), "edges.root": (0,)},
        find=True,
    )
)

SEGMENTATION = [
    Entry("segmentation-models-pytorch", "U-Net", segmentation("Unet"), squares(fixed(2, 3, 32, 32))),
    Entry("segmentation-models-pytorch", "DeepLabV3+", segmentation("DeepLabV3Plus"), squares(fixed(2, 3, 32, 32))),
]


def monai_unet() -> nn.Module:
    nets = importlib.import_module("monai.networks.nets")
    made: nn.Module = nets.UNet(3, 1, 2, channels=(4, 8, 16), strides=(2, 2), num_res_units=1)
    return made


def monai_densenet() -> nn.Module:
    nets = importlib.import_module("monai.networks.nets")
    made: nn.Module = nets.DenseNet(2, 1, 5, init_features=8, growth_rate=4, block_config=(2, 2))
    return made


def x_transformer() -> nn.Module:
    library = importlib.import_module("x_transformers")
    decoder = library.Decoder(dim=16, depth=2, heads=2, attn_dim_head=8, rotary_pos_emb=True, ff_glu=True)
    made: nn.Module = library.TransformerWrapper(num_tokens=32, max_seq_len=16, attn_layers=decoder)
    return made


def diffusion() -> nn.Module:
    library = importlib.import_module("diffusers")
    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    made: nn.Module = library.UNet2DModel(
        8, 3, 3, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, attention_head_dim=4, **blocks
    )
    return made


def tabnet() -> nn.Module:
    library = importlib.import_module("pytorch_tabnet.tab_network")
    made: nn.Module = library.TabNet(
        10, 3, n_d=6, n_a=6, group_attention_matrix=torch.eye(10, dtype=F64), virtual_batch_size=4
    )
    return made


def ft_transformer() -> nn.Module:
    library = importlib.import_module("rtdl_revisiting_models")
    settings = library.FTTransformer.get_default_kwargs(n_blocks=1)
    made: nn.Module = library.FTTransformer(n_cont_features=6, cat_cardinalities=[3, 4], d_out=2, **settings)
    return made


def einops_mixer() -> nn.Module:
    torch_layers = importlib.import_module("einops.layers.torch")
    mix, rearrange, reduce = torch_layers.EinMix, torch_layers.Rearrange, torch_layers.Reduce
    return nn.Sequential(
        rearrange("b c (h p) (w q) -> b (h w) (c p q)", p=4, q=4),
        mix("b t c -> b t d", weight_shape="c d", bias_shape="d", c=48, d=12),
        nn.GELU(),
        mix("b t (g d) -> b t (g e)", weight_shape="g d e", g=2, d=6, e=5),
        nn.GELU(),
        reduce("b t d -> b d", "mean"),
        nn.Linear(10, 5),
    )


def kornia_vit() -> nn.Module:
    library = importlib.import_module("kornia.models.vit")
    made: nn.Module = library.VisionTransformer(image_size=16, patch_size=4, embed_dim=12, depth=2, num_heads=2)
    return made


def lightning_module() -> nn.Module:
    library = importlib.import_module("lightning")

    class Classifier(library.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

    return Classifier()


def accelerated() -> nn.Module:
    library = importlib.import_module("accelerate")
    model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 5))
    made: nn.Module = library.Accelerator(cpu=True).prepare(model)
    return made


def opacus_fixed() -> nn.Module:
    validators = importlib.import_module("opacus.validators")
    made: nn.Module = validators.ModuleValidator.fix(timm_model("resnet10t")())
    return made


class OpacusRecurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = importlib.import_module("opacus.layers")
        self.recurrent = layers.DPLSTM(6, 10, batch_first=True)
        self.attention = layers.DPMultiheadAttention(10, 2)
        self.out = nn.Linear(10, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.recurrent(x)[0]
        made: Tensor = self.out(self.attention(hidden, hidden, hidden)[0])
        return made


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.body = kind(6, 10, num_layers=2, bidirectional=True, batch_first=True)
        self.out = nn.Linear(20, 2)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.out(self.body(x)[0])
        return made


class EightBit(nn.Module):
    """A base in 8 bits with a low-rank adapter beside it."""

    def __init__(self) -> None:
        super().__init__()
        quantization = importlib.import_module("torchao.quantization")
        self.base = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        quantization.quantize_(self.base, quantization.Int8WeightOnlyConfig())
        self.base.requires_grad_(False)
        self.down, self.up, self.out = nn.Linear(64, 4), nn.Linear(4, 64), nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.out(self.base(x) + self.up(self.down(x)))
        return made


def fourier() -> nn.Module:
    models = importlib.import_module("neuralop.models")
    made: nn.Module = models.FNO(n_modes=(4, 4), in_channels=1, out_channels=1, hidden_channels=8, n_layers=2)
    return made


EIGHT = fixed(4, 64).float()
PICTURE_BATCH = fixed(4, 1, 8, 8), torch.arange(4)

OTHERS = [
    Entry(
        "torchao",
        "an adapter beside a base in 8 bits (float32)",
        EightBit,
        lambda model: F.cross_entropy(model(EIGHT), torch.arange(4)),
        dtype=None,
    ),
    Entry("neuraloperator", "FNO (complex weights)", fourier, squares(fixed(2, 1, 16, 16)), dtype=None),
    Entry("monai", "3-D U-Net (transposed convolutions)", monai_unet, squares(fixed(2, 1, 8, 8, 8))),
    Entry("monai", "DenseNet", monai_densenet, squares(fixed(4, 1, 16, 16))),
    Entry("x-transformers", "decoder, rotary, gated", x_transformer, squares(tokens(2, 8))),
    Entry("diffusers", "UNet2DModel", diffusion, squares(fixed(2, 3, 8, 8), torch.tensor([3, 5]))),
    Entry("pytorch-tabnet", "TabNet", tabnet, squares(fixed(8, 10))),
    Entry(
        "rtdl-revisiting-models",
        "FT-Transformer",
        ft_transformer,
        squares(fixed(4, 6), torch.tensor([[0, 1], [1, 3], [2, 0], [0, 2]])),
    ),
    Entry(
        "einops",
        "EinMix layers, told in a line",
        einops_mixer,
        classes(4, 3, 16, 16),
        {"layers": {"1.weight": 0, "3.weight": 1}},
        {"1.weight": (0,), "3.weight": (1,)},
    ),
    Entry("kornia", "VisionTransformer", kornia_vit, squares(fixed(2, 3, 16, 16))),
    Entry(
        "lightning",
        "LightningModule, its training_step",
        lightning_module,
        lambda model: model.training_step(PICTURE_BATCH, 0),
    ),
    Entry("accelerate", "a model that was prepared", accelerated, classes(4, 8)),
    Entry("opacus", "timm's resnet10t, fixed by ModuleValidator", opacus_fixed, classes(4, 3, 32, 32)),
    Entry("opacus", "DPLSTM and DPMultiheadAttention", OpacusRecurrent, squares(fixed(4, 5, 6))),
    Entry(
        "torch", "nn.Transformer", lambda: nn.Transformer(8, 2, 1, 1, 12, 0.0), squares(fixed(5, 2, 8), fixed(4, 2, 8))
    ),
    Entry("torch", "LSTM, two layers, both ways", lambda: Recurrent(nn.LSTM), squares(fixed(3, 5, 6))),
    Entry("torch", "GRU, two layers, both ways", lambda: Recurrent(nn.GRU), squares(fixed(3, 5, 6))),
]

ENTRIES = [*TRANSFORMERS, *PEFT, *TIMM, *GEOMETRIC, *SEGMENTATION, *OTHERS]
