"""Networks in whose features images are compared: a small classifier made on the spot, or Inception from a file.

Why it exists: a Frechet distance is a number about a network as much as about images. Inception says nothing about 8x8
digits, and its weights are a download; a classifier of the data at hand is neither. Where the data have no classes, it
tells how an image is turned, which takes features of what is in it (Gidaris et al. 2018). Which one was used is always
said.
It leaves out the distance itself, which is torchmetrics'.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics.image.fid import FrechetInceptionDistance

from recipes.config import ConfigError
from recipes.data import LabelledImages
from recipes.images import to_uint8
from recipes.loading import Loader

SEED = 0
"""Of the small classifier, the same for all evaluations, so that they can be compared."""

TURNS = (0, 1, 2, 3)
"""Quarter turns that are told apart where the data have no classes."""


class SmallClassifier(nn.Module):
    """Three convolutions, means over all places, one linear layer. Its means are the features.

    Args:
        channels: Of the images.
        num_classes: Number of labels.
        width: Number of features.

    Example:
        >>> classifier = SmallClassifier(channels=1, num_classes=10)
        >>> images = torch.zeros(2, 1, 8, 8, dtype=torch.uint8)
        >>> classifier(images).shape, classifier.features(images).shape
        (torch.Size([2, 10]), torch.Size([2, 64]))
    """

    def __init__(self, channels: int, num_classes: int, width: int = 64) -> None:
        super().__init__()
        self.num_features = width
        self.body = nn.Sequential(
            nn.Conv2d(channels, width // 2, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width // 2, width, 3, padding=1, stride=2),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
        )
        self.head = nn.Linear(width, num_classes)

    def features(self, images: Tensor) -> Tensor:
        """Map uint8 images `(batch, channels, H, W)` to `(batch, width)`, fp32."""
        return self.body(images.float() / 127.5 - 1).mean(dim=(2, 3))

    def forward(self, images: Tensor) -> Tensor:
        """Logits `(batch, num_classes)`."""
        return self.head(self.features(images))


class Features(nn.Module):
    """The classifier without its last layer, as torchmetrics wants to call it."""

    def __init__(self, classifier: SmallClassifier) -> None:
        super().__init__()
        self.classifier = classifier
        self.num_features = classifier.num_features

    def forward(self, images: Tensor) -> Tensor:
        """See `SmallClassifier.features`."""
        return self.classifier.features(images)


def train_classifier(data: Any, device: torch.device, steps: int = 1800, batch_size: int = 64) -> SmallClassifier:
    """Train a classifier on the training split, by AdamW at 2e-3; 80 epochs of the digits, in seconds.

    It tells classes apart, or where the data have none, by how many of `TURNS` an image was turned.

    Args:
        data: Data module, set up.
        device: Where to compute. Initialisation and order are drawn on the CPU.
        steps: Optimizer steps.
        batch_size: Images of each.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        channels = data.to_images(data.train[0]["image"][None]).shape[1]
        classifier = SmallClassifier(channels, data.num_classes or len(TURNS)).to(device)
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(SEED)
    size = min(batch_size, len(data.train))
    index: Any = range(len(data.train))
    order: Any = DataLoader(index, batch_size=size, shuffle=True, drop_last=True, generator=generator)
    rows: list[list[int]] = []
    turns: list[Tensor] = []
    for drawn in itertools.islice(itertools.chain.from_iterable(itertools.repeat(order)), steps):
        rows.append(drawn.tolist())
        if not data.num_classes:
            turns.append(torch.randint(len(TURNS), (size,), generator=generator))
    for step, batch in enumerate(Loader(data.train, data.num_workers, batch_sampler=rows)):
        images, labels = pixels(data, batch["image"].to(device)), batch["label"].to(device)
        if not data.num_classes:
            labels = turns[step]
            images = torch.stack([image.rot90(n, (1, 2)) for image, n in zip(images, labels.tolist(), strict=True)])
        loss = F.cross_entropy(classifier(images), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return classifier.eval()


def pixels(data: Any, samples: Tensor) -> Tensor:
    """What one would see: 8-bit images `(batch, channels, H, W)` of what the network is trained on or has drawn."""
    return to_uint8(data.to_images(samples))


@dataclass
class Remembered:
    """The training split of a data module as 8-bit images in memory.

    Args:
        train: What one would see, and labels.
        num_classes: Of the data.

    Example:
        >>> images = torch.zeros(2, 1, 4, 4, dtype=torch.uint8)
        >>> len(Remembered(LabelledImages(images, torch.zeros(2, dtype=torch.long)), num_classes=1).train)
        2
    """

    train: LabelledImages
    num_classes: int
    num_workers: int = field(default=0, init=False)

    def to_images(self, samples: Tensor) -> Tensor:
        """They are images already."""
        return samples


def remembered(data: Any, device: torch.device, batch_size: int, most: int = 2**31) -> Any:
    """Training images read from their files, and decoded if they are latents, once for all that is to see them.

    Args:
        data: Data module, set up.
        device: Where to decode.
        batch_size: Images at a time.
        most: Bytes above which they are read again each time.

    Returns:
        The data themselves if their images are in memory already, or would take more than that.

    Example:
        >>> from recipes.data import SyntheticDataModule
        >>> data = SyntheticDataModule(image_size=4, channels=3, length=70)
        >>> data.setup()
        >>> remembered(data, torch.device("cpu"), batch_size=50).train.images.shape
        torch.Size([70, 3, 4, 4])
    """
    shape = data.to_images(data.train[0]["image"][None].to(device)).shape
    if isinstance(data.train, LabelledImages) or len(data.train) * math.prod(shape) > most:
        return data
    images, labels = [], []
    for batch in Loader(data.train, data.num_workers, batch_size=batch_size):
        images.append(pixels(data, batch["image"].to(device)).cpu())
        labels.append(batch["label"])
    return Remembered(LabelledImages(torch.cat(images), torch.cat(labels)), data.num_classes)


class FrechetDistance(FrechetInceptionDistance):
    """torchmetrics' distance, of grey images as well, which Inception takes for colour images without colour.

    Attributes:
        num_features: Of an image.
    """

    @property
    def num_features(self) -> int:
        """Of the network that it looks through."""
        return len(self.real_features_sum)

    def update(self, imgs: Tensor, real: bool) -> None:
        """Take 8-bit images `(batch, channels, H, W)` of the reference (`real`) or of what is compared with it."""
        grey = imgs.shape[1] == 1 and not self.used_custom_model
        super().update(imgs.expand(-1, 3, -1, -1) if grey else imgs, real)


def frechet_distance(
    classifier: SmallClassifier, inception_weights: str | None, device: torch.device, num_classes: int = 1
) -> tuple[FrechetDistance, str]:
    """The metric, which takes 8-bit images, and the network that it looks through, in words.

    Args:
        classifier: Taken where there is no Inception.
        inception_weights: File with the weights of torch-fidelity's Inception
            (`weights-inception-2015-12-05-6726825d.pth`); nothing is ever downloaded.
        device: Where to compute.
        num_classes: Of the data; 0: the classifier was trained on turns.

    Raises:
        ConfigError: If the file or torch-fidelity is not there. The small network never takes its place silently.
    """
    if inception_weights is None:
        trained_on = "of the training split" if num_classes else "of quarter turns of training images"
        words = f"small classifier {trained_on} ({classifier.num_features} features), not Inception"
        return FrechetDistance(feature=Features(classifier), reset_real_features=False).to(device), words
    path = Path(inception_weights)
    if not path.is_file():
        raise ConfigError(
            f"inception_weights={inception_weights}: there is no such file. Give the path of torch-fidelity's "
            "weights-inception-2015-12-05-6726825d.pth, or leave it out to compare in a small classifier's features."
        )
    try:
        metric = FrechetDistance(2048, reset_real_features=False, feature_extractor_weights_path=str(path))
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"inception_weights={inception_weights} needs torch-fidelity: pip install torch-fidelity. Or leave it out "
            "to compare in a small classifier's features."
        ) from error
    except Exception as error:  # whatever reading a file that is something else raises
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"inception_weights={inception_weights} cannot be read as Inception: {reason}") from error
    return metric.to(device), f"Inception (2048 features, {path.name})"
