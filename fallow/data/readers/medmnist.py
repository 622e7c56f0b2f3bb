"""MedMNIST's .npz files: the 2-D sets with one label per image."""

from __future__ import annotations

from pathlib import Path

from fallow.data.readers.common import ImageSet, Parts, check_labels, check_same_count, damaged, missing, split
from fallow.data.readers.npz import channels_first, load, whole_numbers
from fallow.errors import UserError, suggest

_ORGANS = (
    "bladder", "femur-left", "femur-right", "heart", "kidney-left", "kidney-right", "liver", "lung-left",
    "lung-right", "pancreas", "spleen",
)  # fmt: skip
CLASSES = {
    "pathmnist": (
        "adipose", "background", "debris", "lymphocytes", "mucus", "smooth muscle", "normal colon mucosa",
        "cancer-associated stroma", "colorectal adenocarcinoma epithelium",
    ),
    "dermamnist": (
        "actinic keratoses and intraepithelial carcinoma", "basal cell carcinoma", "benign keratosis-like lesions",
        "dermatofibroma", "melanoma", "melanocytic nevi", "vascular lesions",
    ),
    "octmnist": ("choroidal neovascularization", "diabetic macular edema", "drusen", "normal"),
    "pneumoniamnist": ("normal", "pneumonia"),
    "retinamnist": ("0", "1", "2", "3", "4"),
    "breastmnist": ("malignant", "normal, benign"),
    "bloodmnist": (
        "basophil", "eosinophil", "erythroblast", "immature granulocytes", "lymphocyte", "monocyte", "neutrophil",
        "platelet",
    ),
    "tissuemnist": (
        "Collecting Duct, Connecting Tubule", "Distal Convoluted Tubule", "Glomerular endothelial cells",
        "Interstitial endothelial cells", "Leukocytes", "Podocytes", "Proximal Tubule Segments",
        "Thick Ascending Limb",
    ),
    "organamnist": _ORGANS,
    "organcmnist": _ORGANS,
    "organsmnist": _ORGANS,
}  # fmt: skip
NEEDED = ("train_images", "train_labels", "test_images", "test_labels")
COLOUR = frozenset({"pathmnist", "dermamnist", "retinamnist", "bloodmnist"})
SIDED = frozenset({"organamnist", "organcmnist", "organsmnist"})  # a mirrored left kidney is a right one


def base(name: str) -> str:
    """pathmnist of pathmnist_64, the same set in larger images."""
    stem, _, size = name.partition("_")
    return stem if size in ("64", "128", "224") else name


def check(name: str) -> None:
    """Ends with a sentence where the set is not one that an image classifier can learn."""
    if base(name) in CLASSES:
        return
    if name.removesuffix("_64").endswith("3d"):
        raise UserError(f"medmnist:{name} holds 3-D images", f"take a 2-D set: {', '.join(CLASSES)}")
    if base(name) == "chestmnist":
        raise UserError(
            f"medmnist:{name} has several labels per image", f"take a set with one label: {', '.join(CLASSES)}"
        )
    raise UserError(f"MedMNIST has no set {name!r}", suggest(name, CLASSES))


def read(folder: Path, name: str) -> Parts:
    """A 2-D, single-label set of MedMNIST; its validation part stays unused."""
    path, classes = folder / f"{name}.npz", CLASSES[base(name)]
    if not path.is_file():
        raise missing(path)
    arrays = load(path, NEEDED)
    for key in NEEDED:
        if key not in arrays:
            raise damaged(path, f"it has no array {key!r}")

    def part(which: str) -> ImageSet:
        images, labels = arrays[f"{which}_images"], arrays[f"{which}_labels"]
        if images.ndim == 5 or (images.ndim == 4 and images.shape[3] != 3):
            raise UserError(f"{path} holds 3-D images", "take one of MedMNIST's 2-D sets")
        if labels.ndim == 2 and labels.shape[1] > 1:
            raise UserError(f"{path} has several labels per image", "take a MedMNIST set with one label per image")
        check_same_count(len(images), len(labels), path)
        return split(channels_first(images, path), check_labels(whole_numbers(labels, path), len(classes), path))

    return Parts(classes, part("train"), part("test"))
