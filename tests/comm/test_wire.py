"""The wire format: every field survives, every wrong message is named."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchmoe.comm.wire import COUNTS_HEADER, KINDS, Header, Layout, pack_counts, unpack_counts
from torchmoe.errors import ConfigError, ExchangeError

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int32)
CPU = torch.device("cpu")


@given(
    st.lists(st.tuples(st.integers(1, 9), st.sampled_from(DTYPES)), min_size=1, max_size=3),
    st.integers(1, 5),
)
def test_fields_survive_in_aligned_records(fields: list[tuple[int, torch.dtype]], rows: int) -> None:
    layout = Layout(tuple(fields))
    g = torch.Generator().manual_seed(0)
    tensors = [torch.randn(rows, c, generator=g).mul(100).to(d) for c, d in fields]
    header = Header("dispatch", 3, 7, 11, rows)
    message = layout.pack(header, tensors, device=CPU)
    assert layout.stride % 16 == 0 and message.numel() == layout.num_bytes(rows)
    layout.check(layout.proof(message), message, header, "recv")
    for view, tensor in zip(layout.views(message), tensors, strict=True):
        assert torch.equal(view[1:], tensor)
        assert not view[0].any()  # the header is cleared: its bits would be rows


@given(
    st.lists(st.tuples(st.integers(1, 9), st.sampled_from(DTYPES)), min_size=1, max_size=3),
    st.lists(st.integers(1, 4), max_size=3),
    st.booleans(),
)
def test_messages_gathered_at_once_are_those_packed_one_by_one(
    fields: list[tuple[int, torch.dtype]], rows: list[int], check: bool
) -> None:
    layout = Layout(tuple(fields))
    g = torch.Generator().manual_seed(0)
    values = [torch.randn(6, c, generator=g).mul(100).to(d) for c, d in fields]
    picked = [torch.randint(6, (n,), generator=g) for n in rows]
    headers = [Header("dispatch", 3, 7, i, n) for i, n in enumerate(rows)]
    index = torch.cat([torch.zeros(0, dtype=torch.long), *(torch.cat([torch.tensor([5]), p]) for p in picked)])
    got = layout.gather(headers, values, index, device=CPU, check=check)
    want = [layout.pack(h, [v[p] for v in values], device=CPU, check=check) for h, p in zip(headers, picked, strict=True)]
    assert len(got) == len(want) and all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_nothing_is_sent_for_no_rows() -> None:
    assert Layout(((4, torch.float32),)).num_bytes(0) == 0


@given(
    st.sampled_from(KINDS),
    st.integers(0, 32767),
    st.integers(0, 32767),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**23 - 16),
)
def test_header_words_round_trip(kind: str, layer: int, mb: int, seq: int, rows: int, check: int) -> None:
    header = Header(kind, layer, mb, seq, rows)
    words = torch.tensor(header.words(check), dtype=torch.int64)  # must fit
    assert Header.of_words(*words.tolist()) == (header, check)


def test_a_header_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="32768"):
        Header("ids", 0, 32768, 1, 1).words()


@pytest.mark.parametrize("field, value", [("kind", "combine"), ("layer", 4), ("microbatch", 8), ("sequence", 12), ("rows", 1)])
def test_another_message_is_named(field: str, value: object) -> None:
    layout = Layout(((3, torch.float32),))
    expected = Header("dispatch", 3, 7, 11, 2)
    other = expected._replace(**{field: value})
    message = layout.pack(expected, [torch.zeros(2, 3)], device=CPU)
    message[:16].view(torch.int64).copy_(torch.tensor(other.words()))
    with pytest.raises(ExchangeError) as e:
        layout.check(layout.proof(message), message, expected, "recv dispatch from rank 5")
    assert "from rank 5" in str(e.value) and str(expected) in str(e.value) and str(other) in str(e.value)


def test_an_end_that_never_came_is_noticed() -> None:
    layout, header = Layout(((3, torch.float64),)), Header("combine", 0, 0, 1, 2)
    buffer = torch.zeros(layout.num_bytes(2), dtype=torch.uint8)
    layout.mark(buffer)
    sent = layout.pack(header, [torch.ones(2, 3)], device=CPU)
    buffer[:-16] = sent[:-16]
    with pytest.raises(ExchangeError, match="its end never came"):
        layout.check(layout.proof(buffer), buffer, header, "recv")


@given(st.integers(0, 200), st.integers(0, 7))
def test_any_flipped_bit_of_checked_rows_is_found(at: int, bit: int) -> None:
    layout, header = Layout(((5, torch.float64),)), Header("combine", 0, 0, 1, 4)
    g = torch.Generator().manual_seed(at)
    message = layout.pack(header, [torch.randn(4, 5, generator=g, dtype=torch.float64)], device=CPU, check=True)
    layout.check(layout.proof(message.clone()), message, header, "recv")
    message[layout.stride + at % (4 * layout.stride)] ^= 1 << bit
    with pytest.raises(ExchangeError, match="corrupted"):
        layout.check(layout.proof(message.clone()), message, header, "recv")


@given(st.lists(st.integers(0, 1000), min_size=2, max_size=8).filter(lambda x: len(x) % 2 == 0), st.data())
def test_counts_survive_and_any_flipped_bit_is_found(counts: list[int], data: st.DataObject) -> None:
    header = Header("counts", 2, 5, 9, sum(counts[::2]))
    (message,) = pack_counts(torch.tensor(counts).view(1, -1, 2), [header], plan=77)
    words = unpack_counts(message.clone()[None], [header], [1], "recv counts", plan=77)
    assert words[0, COUNTS_HEADER:].tolist() == counts and int(words[0, COUNTS_HEADER - 1]) == header.rows
    message[data.draw(st.integers(0, message.numel() - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(ExchangeError, match="recv counts from rank 1"):
        unpack_counts(message[None], [header], [1], "recv counts", plan=77)


def test_the_source_whose_counts_are_wrong_is_the_one_named() -> None:
    headers = [Header("counts", 0, 0, 1, 3)] * 3
    buffer = torch.stack(pack_counts(torch.tensor([[[3, 4]]] * 3), headers, plan=5))
    other = torch.stack(pack_counts(torch.tensor([[[3, 4]]] * 3), headers, plan=6))
    buffer[2] = other[2]
    with pytest.raises(ExchangeError, match=r"from rank 9: .* other settings"):
        unpack_counts(buffer, headers, [7, 8, 9], "recv counts", plan=5)
