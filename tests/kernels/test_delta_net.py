"""Gated DeltaNet, in PyTorch and in Triton, against its recurrence in float64, token by token."""

from typing import Any

import numpy as np
import pytest
import torch
from attention_cases import DEVICE, randn

from nanovllm.recurrent import delta_rule
from nanovllm.tensors.delta_net import DeltaNet, DeltaState

FORMS = ["torch"]


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> Any:
    """Its functions `decode` and `prompts`."""
    return delta_rule


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


class Recurrence:
    """A sequence in float64, from the formulas.

    Attributes:
        tail: [J - 1, C]
        S: [Hv, V, K]
        length: number of its tokens.
        lowest: least g so far.
    """

    def __init__(self, layer: DeltaNet, V: int, K: int) -> None:
        self._conv, self._A_log, self._dt_bias, self._norm = (
            x.double().cpu().numpy() for x in layer[:4]
        )
        self._eps, self._Hk = layer.eps, layer.num_key_heads
        C, J = layer.conv.shape
        self.tail = np.zeros((J - 1, C))
        self.S = np.zeros((len(layer.A_log), V, K))
        self.length, self.lowest = 0, 0.0

    def append(self, mixed: np.ndarray, ba: np.ndarray) -> np.ndarray:
        """The output [Hv V] of a token."""
        Hv, V, K = self.S.shape
        C = self.tail.shape[1]
        inputs = np.vstack([self.tail, mixed[:C]])
        c = sum(self._conv[:, j] * inputs[j] for j in range(len(inputs)))
        c = c * sigmoid(c)
        q, k, v = np.split(c, [self._Hk * K, 2 * self._Hk * K])
        q, k = (np.repeat(x.reshape(self._Hk, K), Hv // self._Hk, 0) for x in (q, k))
        q, k = (x / np.sqrt((x * x).sum(1, keepdims=True) + 1e-6) for x in (q, k))
        b, a = np.split(ba, 2)
        g = -np.exp(self._A_log) * np.logaddexp(0, a + self._dt_bias)
        self.lowest = min(self.lowest, g.min())
        S = self.S * np.exp(g)[:, None, None]
        d = sigmoid(b)[:, None] * (v.reshape(Hv, V) - np.einsum("hvk,hk->hv", S, k))
        self.S = S + d[:, :, None] * k[:, None, :]
        self.tail, self.length = inputs[1:], self.length + 1
        o = np.einsum("hvk,hk->hv", self.S, q) / np.sqrt(K)
        o /= np.sqrt((o * o).mean(1, keepdims=True) + self._eps)
        z = mixed[C:].reshape(Hv, V)
        return (self._norm * o * z * sigmoid(z)).ravel()


class Case:
    """Sequences, each with a row of states in which all rows begin as NaN.

    `append` and `decode` give tokens to a form and to `Recurrence`, and compare all that is left.
    """

    def __init__(
        self, form: Any, num_seqs: int, *, Hk: int = 2, Hv: int = 4, K: int = 16, V: int = 32,
        J: int = 4, dtype: torch.dtype = torch.float32, steepest: float = 3.0, spread: float = 1.0,
        seed: int = 0,
    ) -> None:  # fmt: skip
        self.form, self.dtype, C = form, dtype, 2 * Hk * K + Hv * V
        self.layer = DeltaNet(
            conv=randn(C, J, dtype=dtype, seed=seed + 1),
            # g is about -0.01 in the first head, and `steepest` times softplus(a) in the last.
            A_log=torch.linspace(-4.6, float(np.log(steepest)), Hv, device=DEVICE),
            dt_bias=randn(Hv, seed=seed + 2),
            norm=1 + 0.5 * randn(V, seed=seed + 3),
            eps=1e-6,
            num_key_heads=Hk,
        )
        self.state = DeltaState(
            torch.full((num_seqs + 3, J - 1, C), torch.nan, dtype=dtype, device=DEVICE),
            torch.full((num_seqs + 3, Hv, V, K), torch.nan, device=DEVICE),
        )
        order = torch.randperm(num_seqs + 2, generator=torch.Generator().manual_seed(seed))
        self.rows = (1 + order)[:num_seqs].tolist()  # never row 0, which is of padding
        self.seqs = [Recurrence(self.layer, V, K) for _ in self.rows]
        self.spread, self.seed = spread, seed + 10

    def _tokens(self, num: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs of some tokens; rows lie apart."""
        self.seed += 2
        C, width = len(self.layer.conv), self.seqs[0].S.shape[0] * self.seqs[0].S.shape[1]
        mixed = torch.full((num, C + width + 8), torch.nan, dtype=self.dtype, device=DEVICE)
        mixed = mixed[:, : C + width]
        mixed.copy_(randn(num, C + width, seed=self.seed))
        ba = randn(num, 2 * len(self.layer.A_log) + 2, dtype=self.dtype, seed=self.seed + 1)
        ba[:, len(self.layer.A_log) :] *= self.spread
        return mixed, ba[:, :-2]

    def _check(
        self, out: torch.Tensor, wanted: list[np.ndarray], used: set[int], before: DeltaState
    ) -> None:
        """The first outputs, those of padding, the states of these sequences, and all others."""
        assert out.dtype == self.dtype and out.isfinite().all()
        if wanted:
            found = out[: len(wanted)].double().cpu().numpy()
            half_ulp = {torch.float32: 0.0, torch.bfloat16: 2.0**-8}[self.dtype]
            np.testing.assert_allclose(found, np.stack(wanted), rtol=half_ulp + 1e-5, atol=3e-5)
        for i in used:
            row, seq = self.rows[i], self.seqs[i]
            assert np.array_equal(self.state.tail[row].double().cpu().numpy(), seq.tail)
            error = np.abs(self.state.memory[row].double().cpu().numpy() - seq.S)
            largest = np.abs(seq.S).max((1, 2), keepdims=True)
            assert (error <= 1e-5 * largest).all(), (i, (error / largest).max((1, 2)))
        others = [
            row for row in range(1, len(before.tail)) if row not in map(self.rows.__getitem__, used)
        ]
        for now, then in zip(self.state, before, strict=True):
            assert torch.equal(now[others].nan_to_num(7.7), then[others].nan_to_num(7.7))

    def append(self, *parts: tuple[int, int], padding: int = 0) -> None:
        """Give (sequence, number of tokens) as prompts; -1 for an empty one of no sequence."""
        before = DeltaState(*(x.clone() for x in self.state))
        rows = [0 if i < 0 else self.rows[i] for i, _ in parts]
        nums = [n for _, n in parts]
        mixed, ba = self._tokens(sum(nums) + padding)
        lens = [n + (0 if i < 0 else self.seqs[i].length) for i, n in parts]
        slots, cu_q, cu_k = (
            torch.tensor(x, dtype=torch.int32, device=DEVICE)
            for x in (rows, np.cumsum([0, *nums]), np.cumsum([0, *lens]))
        )
        out = self.form.prompts(mixed, ba, self.layer, self.state, slots, cu_q, cu_k)
        rows_of = zip(mixed.double().cpu().numpy(), ba.double().cpu().numpy(), strict=True)
        wanted = [self.seqs[i].append(*next(rows_of)) for i, n in parts for _ in range(n)]
        self._check(out, wanted, {i for i, n in parts if n}, before)

    def decode(self, *seqs: int, padding: int = 0) -> None:
        """Give each of these sequences a token."""
        before = DeltaState(*(x.clone() for x in self.state))
        mixed, ba = self._tokens(len(seqs) + padding)
        mixed[len(seqs) :] = torch.nan
        # A length of 0 is padding, whatever its slot says.
        rows = [self.rows[i] for i in seqs] + [0, *self.rows][:padding]
        lens = [self.seqs[i].length + 1 for i in seqs] + padding * [0]
        slots, context_lens = (
            torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (rows, lens)
        )
        out = self.form.decode(mixed, ba, self.layer, self.state, slots, context_lens)
        given = mixed.double().cpu().numpy(), ba.double().cpu().numpy()
        wanted = [self.seqs[i].append(*(x[j] for x in given)) for j, i in enumerate(seqs)]
        self._check(out, wanted, set(seqs), before)


HEADS: dict[str, dict[str, Any]] = {
    "two value heads": {},
    "one": {"Hk": 3, "Hv": 3, "K": 32, "V": 16},
    "three, two taps": {"Hk": 1, "Hv": 3, "J": 2},
    "four, bfloat16": {"Hk": 1, "Hv": 4, "V": 16, "dtype": torch.bfloat16},
}


@pytest.mark.parametrize("heads", HEADS)
def test_prompts_and_their_decodes(form: Any, heads: str) -> None:
    """Ends of chunks and shorter prompts than the convolution; padding and empty prompts."""
    lens = [1, 64, 2, 65, 3, 63, 4] if heads == "two value heads" else [2, 66, 1]
    case = Case(form, len(lens), **HEADS[heads])
    parts = [*enumerate(lens)]
    case.append((-1, 0), *parts[:2], (-1, 0), *parts[2:], (-1, 0), padding=70)
    case.decode(*range(len(lens)), padding=3)
    case.decode(*reversed(range(len(lens))))


def test_a_prompt_in_parts(form: Any) -> None:
    """Cut within the convolution's reach, within and between chunks; with whole ones beside."""
    case = Case(form, 4)
    case.append((0, 1), (1, 12))
    case.append((1, 85), (2, 2), (0, 1))
    case.append((0, 2), (2, 1), (1, 64), (3, 70), (-1, 0))
    case.append((3, 3), (0, 1), (1, 39))
    assert [seq.length for seq in case.seqs] == [5, 200, 3, 73]
    case.decode(2, 0, 3, 1)


def test_a_sequence_of_decodes(form: Any) -> None:
    """It begins in a row of NaN, also beside others that go on."""
    case = Case(form, 3)
    case.decode(1, padding=2)
    for _ in range(4):
        case.decode(1, 2)
    case.decode(0, 1, 2)
    case.append((2, 5), (0, 66))
    case.decode(0, 2)
    case.decode(padding=3)


def test_what_decays_at_once(form: Any) -> None:
    """After a token at which a state is forgotten (exp(-80) in float32 times anything is nothing),
    others that decay little: the sum of a chunk's g is in the thousands, and its differences still
    have all digits.
    """
    case = Case(form, 2, steepest=20.0, spread=4.0, seed=40)
    case.append((0, 130), (1, 64))
    case.append((1, 67))
    case.decode(1, 0)
    assert min(seq.lowest for seq in case.seqs) < -80


@pytest.mark.slow
def test_many_tokens(form: Any) -> None:
    case = Case(form, 1, steepest=1.0, seed=60)
    case.append((0, 8192))
