"""The values of the key `average`."""

from fallow.methods.parts.averaging import Averager
from fallow.methods.parts.dma import DMA
from fallow.methods.parts.grouping import Grouping

AVERAGERS: dict[str, type[Averager]] = {"mean": Averager, "grouped": Grouping, "dma": DMA}
