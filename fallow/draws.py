"""Random draws without a generator: the n-th draw of a key is a hash of (key, n).

Integer tensor code only, so a draw has the same bits on CPU and on every GPU, in any batch size and order.

>>> k = key(0, "shuffle", 3)
>>> int(permutation(k, 5).sum())
10
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_MIX1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX2 = 0x94D049BB133111EB - 2**64
_HOST = {n: np.uint64(n % 2**64) for n in (1, 11, 27, 30, 31, 32, _GAMMA, _MIX1, _MIX2)}


def key(*parts: int | str) -> int:
    """A 63-bit key of any parts, such as (seed, purpose, round, party, stream)."""
    text = "\x1f".join(f"{type(p).__name__[0]}{p}" for p in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def _shift(x: Tensor, n: int) -> Tensor:
    return (x >> n) & (2 ** (64 - n) - 1)  # int64's shift is arithmetic; the hash wants a logical one


def bits(key: int | Tensor, n: int | Tensor) -> Tensor:
    """64 random bits (as int64) for each counter `n` of each key; both broadcast (SplitMix64's finaliser)."""
    key, n = torch.as_tensor(key), torch.as_tensor(n)
    x = key + (n + 1) * _GAMMA
    x = (x ^ _shift(x, 30)) * _MIX1
    x = (x ^ _shift(x, 27)) * _MIX2
    return x ^ _shift(x, 31)


def host_bits(key: int | np.ndarray, n: np.ndarray) -> np.ndarray:
    """The same by numpy, which takes a quarter of the time for the small arrays of a plan."""
    x = (n.view(np.uint64) + _HOST[1]) * _HOST[_GAMMA] + np.asarray(key).astype(np.uint64)
    for shift, factor in ((30, _MIX1), (27, _MIX2)):
        x ^= x >> _HOST[shift]
        x *= _HOST[factor]
    x ^= x >> _HOST[31]
    return x.view(np.int64)


def host_uniform(keys: Tensor, lanes: Sequence[int]) -> Tensor:
    """`uniform` of keys on the host, a row for each lane: all of them by one hash of numpy's."""
    x = host_bits(keys.numpy(), np.array(lanes)[:, None]).view(np.uint64)
    return torch.from_numpy((x >> _HOST[11]).astype(np.float64) * 2.0**-53)


def host_integers(keys: Tensor, lanes: Sequence[int], high: Sequence[int]) -> Tensor:
    """`integers` of keys on the host, a row for each lane and its `high`."""
    x = host_bits(keys.numpy(), np.array(lanes)[:, None]).view(np.uint64)
    return torch.from_numpy(((x >> _HOST[32]) * np.array(high, np.uint64)[:, None] >> _HOST[32]).view(np.int64))


def uniform(key: int | Tensor, n: int | Tensor) -> Tensor:
    """Float64 on [0, 1), 53 bits."""
    return _shift(bits(key, n), 11).double() * 2.0**-53


def integers(key: int | Tensor, n: int | Tensor, high: int) -> Tensor:
    """Int64 on 0 .. high-1 (high below 2^31; the bias is under high / 2^32)."""
    return (_shift(bits(key, n), 32) * high) >> 32


def permutation(key: int, size: int) -> Tensor:
    """A random order of 0 .. size-1: sorts `size` draws."""
    return torch.argsort(torch.from_numpy(host_bits(key, np.arange(size))), stable=True)


def first(key: int, size: int, count: int) -> Tensor:
    """The first `count` of `permutation(key, size)`, without sorting the rest."""
    return torch.topk(torch.from_numpy(host_bits(key, np.arange(size))), count, largest=False).indices


def rng(key: int) -> np.random.Generator:
    """numpy's Philox with the same key, for the few draws that stay on the host (Beta, choices)."""
    return np.random.Generator(np.random.Philox(key=key))
