"""Gated DeltaNet, in PyTorch and in Triton, against its recurrence in float64, token by token."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from attention_cases import DEVICE, HAS_CUDA, randn

from nanovllm.recurrent import delta_rule
from nanovllm.tensors.delta_net import DeltaNet, DeltaState


def triton_form() -> Any:
    pytest.importorskip("triton")
    from nanovllm.kernels.recurrent.delta_decode import decode
    from nanovllm.kernels.recurrent.delta_prompt import chunks_of, prompts

    def with_chunks(mixed: torch.Tensor, *args: Any) -> torch.Tensor:
        return prompts(mixed, *args, chunks_of(args[-2], len(mixed)))

    return SimpleNamespace(decode=decode, prompts=with_chunks)


@pytest.fixture(params=["torch", "triton"])
def form(request: pytest.FixtureRequest) -> Any:
    """Its functions `decode` and `prompts`."""
    return delta_rule if request.param == "torch" else triton_form()


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 + 0.5 * np.tanh(x / 2)


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
        largest: float = 1.0, seed: int = 0,
    ) -> None:  # fmt: skip
        self.form, self.dtype, C = form, dtype, 2 * Hk * K + Hv * V
        # Of states. Products of the kernels for prompts have numbers of 16 bits, as the model has.
        self.bound = 1e-5 if form is delta_rule or dtype == torch.float32 else 2e-3
        self.layer = DeltaNet(
            conv=randn(C, J, dtype=dtype, seed=seed + 1),
            # g is about -0.01 in the first head, and `steepest` times softplus(a) in the last.
            A_log=torch.linspace(-4.6, float(np.log(steepest)), Hv, device=DEVICE),
            dt_bias=randn(Hv, seed=seed + 2),
            norm=1 + 0.5 * randn(V, seed=seed + 3),
            eps=1e-6,
            num_key_heads=Hk,
        )
        self.layer.conv[2 * Hk * K :] *= largest
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
        self,
        out: torch.Tensor,
        wanted: list[np.ndarray],
        used: set[int],
        before: DeltaState,
        first_row: int,
    ) -> None:
        """The first outputs, those of padding, the states of these sequences, and all others from
        a row on.
        """
        assert out.dtype == self.dtype and out.isfinite().all()
        if wanted:
            found = out[: len(wanted)].double().cpu().numpy()
            # In the mean, as outputs that were close to 0 before the norm may have few digits; and
            # Triton's interpreter cuts bfloat16 off, which alone is 4e-3.
            error, size = (np.sqrt((x * x).mean()) for x in (found - wanted, np.stack(wanted)))
            assert error <= (1e-5 if self.dtype == torch.float32 else 6e-3) * size, error / size
        for i in used:
            row, seq = self.rows[i], self.seqs[i]
            assert np.array_equal(self.state.tail[row].double().cpu().numpy(), seq.tail)
            error = np.abs(self.state.memory[row].double().cpu().numpy() - seq.S)
            largest = np.abs(seq.S).max((1, 2), keepdims=True)
            assert (error <= self.bound * largest).all(), (i, (error / largest).max((1, 2)))
        own = {self.rows[i] for i in used}
        others = [row for row in range(first_row, len(before.tail)) if row not in own]
        for now, then in zip(self.state, before, strict=True):
            assert torch.equal(now[others].nan_to_num(7.7), then[others].nan_to_num(7.7))

    def append(
        self,
        *parts: tuple[int, int],
        padding: int = 0,
        given: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """Give (sequence, number of tokens) as prompts; -1 for an empty one of no sequence."""
        before = DeltaState(*(x.clone() for x in self.state))
        rows = [0 if i < 0 else self.rows[i] for i, _ in parts]
        nums = [n for _, n in parts]
        mixed, ba = self._tokens(sum(nums) + padding) if given is None else given
        mixed[sum(nums) :] = torch.nan
        lens = [n + (0 if i < 0 else self.seqs[i].length) for i, n in parts]
        slots, cu_q, cu_k = (
            torch.tensor(x, dtype=torch.int32, device=DEVICE)
            for x in (rows, np.cumsum([0, *nums]), np.cumsum([0, *lens]))
        )
        out = self.form.prompts(mixed, ba, self.layer, self.state, slots, cu_q, cu_k)
        rows_of = zip(mixed.double().cpu().numpy(), ba.double().cpu().numpy(), strict=True)
        wanted = [self.seqs[i].append(*next(rows_of)) for i, n in parts for _ in range(n)]
        self._check(out, wanted, {i for i, n in parts if n}, before, 0)

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
        self._check(out, wanted, set(seqs), before, 1)  # padding may write to row 0


HEADS: dict[str, dict[str, Any]] = {
    "two value heads": {},
    "one": {"Hk": 3, "Hv": 3, "K": 32, "V": 16},
    "three, two taps": {"Hk": 1, "Hv": 3, "J": 2},
    "four, float16": {"Hk": 1, "Hv": 4, "K": 32, "dtype": torch.float16},
    "of models, bfloat16": {"Hk": 1, "Hv": 2, "K": 128, "V": 128, "dtype": torch.bfloat16},
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


def test_states_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of many sequences, whose programs hold a quarter of a head's state at a time."""
    form = triton_form()
    from nanovllm.kernels.recurrent import delta_decode, delta_prompt

    monkeypatch.setattr(delta_decode, "FEW_PROGRAMS", 0)
    monkeypatch.setattr(delta_decode, "MANY_NUMBERS", 16 * 16)
    monkeypatch.setattr(delta_prompt, "SCANNED_ROWS", 32)
    case = Case(form, 2, V=64)
    case.append((0, 70), (1, 1))
    for _ in range(2):
        case.decode(1, 0)


@pytest.mark.gpu
def test_more_programs_than_multiprocessors() -> None:
    """Of the heads of a model. Several programs share a multiprocessor, each with less of it."""
    case = Case(triton_form(), 5, Hk=16, Hv=32, K=128, V=128, dtype=torch.bfloat16, seed=80)
    case.append((0, 130), (1, 64), (2, 65), (3, 200), (4, 1))
    case.append((2, 64), (0, 3))
    case.decode(*range(5), padding=11)
    case.decode(3, 1)


@pytest.mark.parametrize(("steepest", "lowest"), [(20.0, -80.0), (20000.0, -80000.0)])
def test_what_decays_at_once(form: Any, steepest: float, lowest: float) -> None:
    """After a token at which a state is forgotten (exp(-80) in float32 times anything is nothing),
    others that decay little: the sum of a chunk's g is in the thousands, and its differences still
    have all digits.
    """
    case = Case(form, 2, steepest=steepest, spread=4.0, seed=40)
    case.append((0, 130), (1, 64))
    case.append((1, 67))
    case.decode(1, 0)
    assert min(seq.lowest for seq in case.seqs) < lowest


def test_what_decays_slowly(form: Any) -> None:
    """By 1.5e-5 a token. 1 + exp(a) in float32 is off by a third of its last digit, each time."""
    case = Case(form, 1, steepest=20.0, seed=45)
    Hv = len(case.layer.A_log)
    for _ in range(2):
        mixed, ba = case._tokens(192)
        ba[:, :Hv] = -4 + 0.1 * ba[:, :Hv]
        ba[:, Hv:] = -14.1 - case.layer.dt_bias + 0.01 * ba[:, Hv:]
        case.append((0, 192), given=(mixed, ba))
    assert -2e-5 < case.seqs[0].lowest < -1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_text_that_repeats_itself(form: Any, dtype: torch.dtype) -> None:
    """The same keys again and again, all but replaced by each token, and nothing decays: powers of
    a chunk's matrix reach 1e17, of which nothing remains in its inverse.
    """
    case = Case(form, 1, steepest=0.01, dtype=dtype, seed=50)
    mixed, ba = case._tokens(128)
    C, Hv = len(case.layer.conv), len(case.layer.A_log)
    mixed[8:, : C // 2] = mixed[:1, : C // 2]
    ba[:, :Hv] = 3 + 0.1 * ba[:, :Hv]
    case.append((0, 128), given=(mixed, ba))


def test_numbers_beyond_those_of_16_bits(form: Any) -> None:
    case = Case(form, 1, dtype=torch.bfloat16, largest=6e4, seed=70)
    case.append((0, 70))
    assert np.abs(case.seqs[0].S).max() > 2 * 65504
    case.append((0, 70))
    case.decode(0)


@pytest.mark.slow
def test_many_tokens(form: Any) -> None:
    if form is not delta_rule and not HAS_CUDA:
        pytest.skip("takes a minute in Triton's interpreter")
    for dtype in (torch.float32, torch.bfloat16):
        case = Case(form, 1, steepest=1.0, dtype=dtype, seed=60)
        case.append((0, 8192))


def test_chunks() -> None:
    """Of empty prompts, of the last row, and fewer than there is room for."""
    pytest.importorskip("triton")
    from nanovllm.kernels.recurrent.delta_prompt import chunks_of

    lens = [0, 64, 1, 0, 130, 0]
    ends = torch.tensor([0, *lens], dtype=torch.int32, device=DEVICE).cumsum(0).int()
    wanted = [[1, 0], [2, 64], [4, 65], [4, 129], [4, 193]]
    for T in (195, 200):
        chunks = chunks_of(ends, T)
        assert chunks.dtype == torch.int32 and len(chunks) == 4 + len(lens)
        assert chunks[:5].tolist() == wanted and (chunks[5:, 0] == -1).all()
