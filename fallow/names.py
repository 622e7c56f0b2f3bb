"""What has a name, known without importing anything heavy: methods and recipes."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

METHODS: dict[str, str] = {
    "fedavg": "fallow.methods.fedavg:FedAvg",
    "fedprox": "fallow.methods.fedavg:FedProx",
    "fixmatch": "fallow.methods.fixmatch:FixMatch",
    "uda": "fallow.methods.fixmatch:UDA",
    "semifl": "fallow.methods.semifl:SemiFL",
    "feddb": "fallow.methods.feddb:FedDB",
    "fedrgd": "fallow.methods.fedrgd:FedRGD",
    "fedloke": "fallow.methods.fedloke:FedLoKe",
    "feddure": "fallow.methods.feddure:FedDure",
    "fedmatch": "fallow.methods.fedmatch:FedMatch",
    "semifed": "fallow.methods.semifed:SemiFed",
    "fml": "fallow.methods.fml:FML",
    "sage": "fallow.methods.sage:SAGE",
    "rscfed": "fallow.methods.rscfed:RSCFed",
    "cbafed": "fallow.methods.cbafed:CBAFed",
    "fl2": "fallow.methods.fl2:FL2",
    "proxyfl": "fallow.methods.proxyfl:ProxyFL",
    "heterofl": "fallow.methods.heterofl:HeteroFL",
    "datasharing": "fallow.methods.datasharing:DataSharing",
    "easgd": "fallow.methods.easgd:EASGD",
    "overlapsgd": "fallow.methods.easgd:OverlapSGD",
    "pimodel": "fallow.methods.pimodel:PiModel",
    "pseudolabel": "fallow.methods.pseudolabel:PseudoLabel",
    "meanteacher": "fallow.methods.meanteacher:MeanTeacher",
    "mixmatch": "fallow.methods.mixmatch:MixMatch",
    "remixmatch": "fallow.methods.remixmatch:ReMixMatch",
    "flexmatch": "fallow.methods.flexmatch:FlexMatch",
    "freematch": "fallow.methods.freematch:FreeMatch",
    "softmatch": "fallow.methods.softmatch:SoftMatch",
}


def recipes() -> dict[str, Path]:
    """The recipes by name, `paper/table1`."""
    root = Path(str(resources.files("fallow") / "recipes"))
    return {str(p.relative_to(root).with_suffix("")): p for p in sorted(root.rglob("*.yaml"))}
