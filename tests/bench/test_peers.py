"""Other packages' attention as providers, by fake modules that compute what the real ones do."""

import itertools
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from bench import attention as bench
from bench import measure, peers, providers
from bench.cases import PEERS, PLANS, Case

CPU = torch.device("cpu")
CASES = [Case(2, 4, 2, 96, 64), Case(2, 4, 2, 96, 64, is_causal=True)]
calls = []


def fake_flash(q, k, v, *, softmax_scale, causal, **descales):
    """[B, N, H, D], E4M3 by descales [B, H_kv]; anything else is an error or a wrong answer."""
    calls.append((tuple(q.shape), tuple(k.shape), q.dtype, sorted(descales)))
    x = [each.transpose(1, 2).float() for each in (q, k, v)]
    for i, name in enumerate(("q_descale", "k_descale", "v_descale")):
        if descales:
            scale = descales[name]
            assert scale.dtype == torch.float32 and tuple(scale.shape) == (x[1].shape[:2])
            scale = scale.repeat_interleave(x[i].shape[1] // scale.shape[1], 1)
            x[i] = x[i] * scale[..., None, None]
    out = F.scaled_dot_product_attention(
        *x, is_causal=causal, scale=softmax_scale, enable_gqa=True
    )  # fmt: skip
    return out.transpose(1, 2).bfloat16()


@torch.library.custom_op("fake_sage::qk_int8_sv_f8_attn", mutates_args=("output",))
def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, output: torch.Tensor, causal: int, s: float
) -> torch.Tensor:
    out = F.scaled_dot_product_attention(q, k, v, is_causal=bool(causal), scale=s, enable_gqa=True)
    output.copy_(out)
    return output.new_empty(0)


def fake_sage(q, k, v, tensor_layout="NHD", is_causal=False, sm_scale=None, qk_quant_gran=""):
    """As 2.2: head_dim padded, one torch op at the end that writes its fourth argument."""
    calls.append((tensor_layout, is_causal, sm_scale, qk_quant_gran))
    assert tensor_layout == "HND"
    q, k, v = (F.pad(x, (0, 128 - x.shape[3])) for x in (q, k, v))
    out = torch.empty_like(q)
    attend(q, k, v, out, int(is_causal), sm_scale)
    return out[..., :64]


def fake_quantize(*qkv):
    """torchao's: E4M3 by a scale for each batch and kv head [B, H_kv]."""
    H_kv, found = qkv[1].shape[1], []
    for x in qkv:
        scale = x.unflatten(1, (H_kv, -1)).abs().amax((2, 3, 4)).float() / 448
        by_head = scale.repeat_interleave(x.shape[1] // H_kv, 1)[..., None, None]
        found.append(((x / by_head).to(torch.float8_e4m3fn), scale))
    return tuple(x for x, _ in found) + tuple(scale for _, scale in found)


def fake_rotated(x):
    """A rotation of the channels, which fake_back undoes."""
    return torch.cat([x[..., 1::2] + x[..., ::2], x[..., ::2] - x[..., 1::2]], -1) / 2**0.5


def fake_back(x):
    a, b = x.chunk(2, -1)
    return torch.stack([a + b, a - b], -1).flatten(-2) / 2**0.5


def fake_int8(q, k, v, *, scale=None, attn_mask=None):
    calls.append(("int8", scale))
    return F.scaled_dot_product_attention(q, k, v, attn_mask, scale=scale, enable_gqa=True)


class FakeSymbol:
    """set_NAME(x) sets NAME and gives the symbol."""

    def __init__(self, **given):
        self.output, self.name = False, ""
        vars(self).update(given)

    def __getattr__(self, method):
        name = method.removeprefix("set_")
        if name == method:
            raise AttributeError(method)
        return lambda x: vars(self).update({name: x}) or self


class FakeCudnn(ModuleType):
    """cudnn-frontend of one GPU: E4M3 in; out in bf16 only if `has_bf16`."""

    data_type = SimpleNamespace(
        FLOAT=torch.float32, FP8_E4M3=torch.float8_e4m3fn, BFLOAT16=torch.bfloat16
    )
    heur_mode = SimpleNamespace(A="A", FALLBACK="fallback")
    has_bf16, has_shape = False, True

    def create_handle(self):
        self.stream = None
        return "handle"

    def set_stream(self, handle, stream):
        assert handle == "handle"
        self.stream = stream

    def pygraph(self, io_data_type, intermediate_data_type, compute_data_type, handle):
        assert (io_data_type, compute_data_type) == (torch.float8_e4m3fn, torch.float32)
        return FakeGraph(self)


class FakeGraph:
    def __init__(self, module):
        self.module, self.is_built = module, False

    def tensor(self, **given):
        return FakeSymbol(**given)

    def sdpa_fp8(self, *, generate_stats, attn_scale, use_causal_mask, **given):
        assert not generate_stats and all(name == symbol.name for name, symbol in given.items())
        self.given, self.options = given, (attn_scale, use_causal_mask)
        self.out = [FakeSymbol(name=name) for name in ("out", "amax_s", "amax_o")]
        return self.out[0], None, *self.out[1:]

    def build(self, modes):
        assert modes == ["A", "fallback"] and all(symbol.output for symbol in self.out)
        is_bf16 = self.out[0].data_type == torch.bfloat16
        if not self.module.has_shape or is_bf16 and not self.module.has_bf16:
            raise LookupError(f"no {self.out[0].data_type}")
        self.is_built = True

    def get_workspace_size(self):
        return 16

    def execute(self, tensors, workspace, handle):
        assert self.is_built and workspace.numel() == 16 and self.module.stream == 7
        for symbol, x in tensors.items():
            assert list(x.shape) == symbol.dim and list(x.stride()) == symbol.stride, symbol.name
            assert x.dtype == symbol.data_type, symbol.name
        x = {symbol.name: tensors[symbol].float() for symbol in (*self.given.values(), *self.out)}
        calls.append({name: x[name].item() for name in self.given if x[name].numel() == 1})
        q, k, v = (x[name] * x[f"descale_{name}"] for name in "qkv")
        k, v = (y.repeat_interleave(q.shape[1] // y.shape[1], 1) for y in (k, v))
        scale, is_causal = self.options
        s = q @ k.mT * scale
        s = s.masked_fill(~torch.ones_like(s).tril().bool(), -torch.inf) if is_causal else s
        p = (s - s.amax(-1, keepdim=True)).exp()
        p_fp8 = (p * x["scale_s"]).to(torch.float8_e4m3fn).float()
        out = (p_fp8 @ v) * x["descale_s"] / p.sum(-1, keepdim=True)
        scaled = out * x["scale_o"]
        assert scaled.abs().max() <= 448 * 1.05  # and no NaN of E4M3
        found = scaled.clamp(-448, 448), p.max(), out.abs().max()
        for symbol, y in zip(self.out, found):
            tensors[symbol].copy_(y.to(symbol.data_type).view_as(tensors[symbol]))


@pytest.fixture
def installed(monkeypatch):
    """All peers, on a Hopper."""
    calls.clear()
    for name in ("flash_attn", "flash_attn.cute", *itertools.chain(*peers.MODULES.values())):
        made = FakeCudnn(name) if name == "cudnn" else ModuleType(name)
        monkeypatch.setitem(sys.modules, name, made)
    stream = SimpleNamespace(cuda_stream=7)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    sys.modules["flash_attn_interface"].flash_attn_func = fake_flash
    sys.modules["flash_attn.cute.interface"].flash_attn_func = lambda *args, **kwargs: (
        fake_flash(*args, **kwargs), None
    )  # fmt: skip
    sys.modules["sageattention"].sageattn = fake_sage
    sys.modules["sageattention"].sageattn_qk_int8_pv_fp8_cuda_sm90 = fake_sage
    monkeypatch.setattr(peers, "on_hopper", lambda: True)
    torchao = sys.modules["torchao.prototype.attention.quantization"]
    torchao._fp8_sdpa_quantize = fake_quantize
    torchao._fp8_hadamard_sdpa_quantize = lambda *qkv: fake_quantize(*map(fake_rotated, qkv))
    torchao._inverse_hadamard_transform = fake_back
    sys.modules["comfy_kitchen"].int8_attention = fake_int8


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.family)
def test_each_peer_is_attention_with_grouped_heads(case, installed):
    """From [B, H, N, D] to [B, H, N, D]; on inputs whose heads differ in size, so that a scale of
    another head or batch shows."""
    q, k, v = measure.draw(case, "normal", CPU)
    sizes = torch.tensor([1.0, 2.0], dtype=q.dtype)
    q = q * sizes.repeat_interleave(2)[:, None, None]
    k, v = k * sizes.view(2, 1, 1, 1), v * (4 * sizes)[:, None, None]
    exact = measure.Exact(q, k, v, is_causal=case.is_causal)
    names = []
    for provider in providers.build(case, PEERS, []):
        args = provider.prepare(q, k, v)
        calls.clear()
        out = provider.call(*args)
        assert out.shape == q.shape
        assert exact.compare(out)["rel_l1"] < (0.09 if "fp8" in provider.name else 0.01)
        kernel_alone = provider.name.startswith("sageattention") and "kernel" in provider.name
        assert len(calls) == (0 if kernel_alone else 1)
        for call in (each for each in calls if isinstance(each, tuple)):
            if call[0] == "HND":
                assert call[1:3] == (case.is_causal, 0.125) and call[3] in provider.name
            elif isinstance(call[0], tuple):
                dtype = torch.float8_e4m3fn if "fp8" in provider.name else torch.bfloat16
                assert call[:3] == ((2, 96, 4, 64), (2, 96, 2, 64), dtype)
        assert provider.captures != provider.name.startswith("sageattention")
        names.append(provider.name)
    grains = ("per_warp", "per_thread")
    sage = [f"sageattention {grain} {kind}" for grain in grains for kind in ("kernel", "op")]
    cudnn = [f"cuDNN-fp8 {kind}" for kind in ("kernel", "op")]
    torchao = ["torchao-fp8 op", "torchao-fp8 hadamard op"]
    kitchen = [] if case.is_causal else ["comfy-kitchen op"]
    expected = ["FA3", "FA3-fp8 kernel", "FA3-fp8 op", "FA4", *sage, *cudnn, *torchao, *kitchen]
    assert names == expected


def test_the_largest_of_each_group_is_the_largest_of_e4m3(installed):
    """FA3 has one scale for all heads of q that share a kv head."""
    case = CASES[0]
    kernel = providers.build(case, ("FA3-fp8",), [])[0]
    qkv = measure.draw(case, "outlier", CPU)
    *x, q_scale, k_scale, v_scale = kernel.prepare(*qkv)
    for each, exact, scale in zip(x, qkv, (q_scale, k_scale, v_scale), strict=True):
        groups = each.float().view(2, 2, -1)
        assert (groups.abs().amax(-1) == 448).all() and tuple(scale.shape) == (2, 2)
        back = groups * scale[..., None]
        torch.testing.assert_close(back, exact.float().view(2, 2, -1), rtol=2**-4, atol=0.1)
    zero = torch.zeros_like(qkv[0]), *qkv[1:]
    assert kernel.prepare(*zero)[0].float().eq(0).all()


@pytest.mark.parametrize("has_bf16", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.family)
def test_cudnns_output_is_bf16_or_by_the_scale_of_v(case, has_bf16, installed):
    """With one scale a tensor: the largest of all heads and batches is E4M3's largest."""
    sys.modules["cudnn"].has_bf16 = has_bf16
    qkv = measure.draw(case, "outlier", CPU)
    exact = measure.Exact(*qkv, is_causal=case.is_causal)
    kernel, op = providers.build(case, ("cuDNN-fp8",), [])
    for provider in (kernel, op):
        args = provider.prepare(*qkv)
        out = provider.call(*args)
        assert out.dtype == torch.bfloat16 and exact.compare(out)["rel_l1"] < 0.04
    given = calls[-1]
    amax = {name: x.abs().max().item() for name, x in zip("qkv", qkv)}
    assert {name: given[f"descale_{name}"] for name in "qkv"} == pytest.approx(
        {name: x / 448 for name, x in amax.items()}
    )
    assert given["scale_s"] * given["descale_s"] == 1 and given["scale_s"] <= 448
    assert given["scale_o"] == pytest.approx(1.0 if has_bf16 else 448 / amax["v"])
    assert all(x.float().abs().max() == 448 for x in kernel.prepare(*qkv)[:3])


def test_what_cudnn_does_not_have_is_an_error_of_the_first_call(installed):
    sys.modules["cudnn"].has_shape = False
    kernel, _ = providers.build(CASES[0], ("cuDNN-fp8",), [])
    with pytest.raises(LookupError, match="no torch.float8_e4m3fn"):
        kernel.call(*kernel.prepare(*measure.draw(CASES[0], "normal", CPU)))


def test_elsewhere_than_on_hopper_sageattention_chooses(installed, monkeypatch):
    monkeypatch.setattr(peers, "on_hopper", lambda: False)
    (op,) = providers.build(CASES[0], ("sageattention",), [])
    assert op.name == "sageattention op" and not op.captures
    monkeypatch.setattr(peers, "on_hopper", lambda: True)
    sys.modules["sageattention"].sageattn_qk_int8_pv_fp8_cuda_sm90 = lambda q, *_, **__: q
    kernel = providers.build(CASES[0], ("sageattention",), [])[0]
    with pytest.raises(RuntimeError, match="no torch op named qk_int8_sv_f8"):
        kernel.prepare(*measure.draw(CASES[0], "normal", CPU))


def test_a_peer_is_asked_no_mask(installed):
    assert not providers.build(Case(2, 4, 2, 96, 64, mask="keys"), PEERS, [])


def test_who_is_not_installed_is_named_and_left_out(monkeypatch, capsys):
    for name in itertools.chain(*peers.MODULES.values()):
        monkeypatch.setitem(sys.modules, name, None)  # importing it raises ImportError
    monkeypatch.setitem(sys.modules, "sageattention", ModuleType("sageattention"))
    args = bench.parse(["--shapes", "peers"])
    assert bench.wanted(args) == ["cuDNN", *PEERS, "kernel", "op"]
    plan = bench.overridden(PLANS["peers"], args)
    assert plan.providers == ("cuDNN", "sageattention", "kernel", "op")
    absent = peers.absent(bench.wanted(args))
    others = [kind for kind in PEERS if kind != "sageattention"]
    assert list(absent) == sorted(others)
    assert "flash_attn_interface" in absent["FA3"] and "flash_attn" in absent["torchao-fp8"]
    with pytest.raises(SystemExit):
        bench.parse(["--providers", "cuDNN", "FA4"])
    assert "--providers FA4 is not installed: " in capsys.readouterr().err
    assert bench.parse(["--providers", "sageattention"]).providers == ["sageattention"]


def test_versions_are_of_the_distributions(monkeypatch):
    monkeypatch.setitem(peers.MODULES, "FA4", ("torch.nn",))
    # Without "+cu130", which some wheels name in torch.__version__ alone.
    found = {name: version.partition("+")[0] for name, version in peers.versions(["FA4"]).items()}
    assert found == {"torch": torch.__version__.partition("+")[0]}
    assert peers.versions(["cuDNN"]) == {}


def test_what_must_not_be_captured_is_launched(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: pytest.fail("captured"))
    runner = measure.Runner(
        measure.Provider("p", lambda x: x + 1, captures=False), [(torch.ones(2),)]
    )
    assert not runner.captured and runner.output().tolist() == [2, 2]
