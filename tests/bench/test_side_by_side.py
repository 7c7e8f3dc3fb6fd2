"""bench/side_by_side.py with small pipelines of random weights."""

import json
from types import SimpleNamespace

import models
import numpy as np
import pytest
import torch

from bench import side_by_side

diffusers = pytest.importorskip("diffusers")
PIL = pytest.importorskip("PIL.Image")


def video_pipeline():
    """diffusers' own, but for the text encoder: prompts are random embeddings."""

    class Pipeline(diffusers.WanPipeline):
        def encode_prompt(self, prompt, **_):
            torch.manual_seed(len(prompt))
            return [torch.randn(1, 6, 16, dtype=torch.bfloat16) for _ in range(2)]

    torch.manual_seed(0)
    transformer = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=32, in_channels=16,
        out_channels=16, text_dim=16, freq_dim=16, ffn_dim=64, num_layers=1,
    )  # fmt: skip
    vae = diffusers.AutoencoderKLWan(
        base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1,
        temperal_downsample=[False, True, True],
    )  # fmt: skip
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    return Pipeline(None, None, vae, scheduler, transformer=transformer).to(torch.bfloat16)


class ImagePipeline:
    def __init__(self):
        torch.manual_seed(0)
        model, self.inputs = models.flux()
        self.transformer, self.steps = model.to(torch.bfloat16), []

    def to(self, device):
        return self

    @torch.no_grad()
    def __call__(self, prompt, generator, output_type, num_inference_steps=4, height=8):
        assert output_type == "np"
        self.steps.append(num_inference_steps)
        x = torch.randn(self.inputs["hidden_states"].shape, generator=generator)
        inputs = self.inputs | {"hidden_states": x}
        kinds = {k: v.bfloat16() if v.is_floating_point() else v for k, v in inputs.items()}
        out = self.transformer(**kinds).sample.float().sigmoid()  # [1, 64, 16]
        return SimpleNamespace(images=out.reshape(1, height, -1, 1).repeat(1, 1, 1, 3).numpy())


def run(monkeypatch, tmp_path, pipe, *more):
    loaded = SimpleNamespace(from_pretrained=lambda name, torch_dtype: pipe)
    monkeypatch.setattr(diffusers, "DiffusionPipeline", loaded)
    png, result = tmp_path / "a.png", tmp_path / "a.json"
    argv = ["some/model", "a lighthouse", *more, "--png", str(png), "--json", str(result)]
    assert side_by_side.main([*argv, "--device", "cpu"]) == 0
    (row,) = json.loads(result.read_text())["rows"]
    return row, np.asarray(PIL.open(png).convert("RGB")) / 255


def columns_of(pixels, rows, height):
    below = pixels[side_by_side.HEAD :]
    assert below.shape[0] == rows * height
    return np.split(below, 3, axis=1)


@pytest.mark.models
def test_a_videos_first_and_middle_frame_are_drawn_with_their_difference(
    op_by_op, monkeypatch, tmp_path, capsys
):
    sizes = ("--height", "32", "--width", "48", "--frames", "5", "--steps", "2")
    row, pixels = run(monkeypatch, tmp_path, video_pipeline(), *sizes, "--recipe", "sage2-4b")
    exact, sage, difference = columns_of(pixels, rows=2, height=32)
    assert exact.shape == (64, 48, 3) and row["frames"] == [5, 32, 48, 3]
    assert 10 < row["psnr"] < 70 and row["exact_s"] > 0 < row["sage_s"]
    assert row["report"].startswith("2 of 2 attention calls use sage2-4b")
    assert np.abs(difference - (10 * abs(exact - sage)).clip(0, 1)).max() < 11 / 255  # rounded
    assert difference.max() > 0 and "PSNR" in capsys.readouterr().out


@pytest.mark.models
def test_an_image_is_one_row_and_the_first_call_is_of_two_steps(op_by_op, monkeypatch, tmp_path):
    pipe = ImagePipeline()
    row, pixels = run(monkeypatch, tmp_path, pipe)
    exact, sage, _ = columns_of(pixels, rows=1, height=8)
    assert pipe.steps == [2, 4, 2, 4]
    assert side_by_side.psnr(exact, sage) > 40 < row["psnr"]  # of the same noise
    assert np.ptp(exact) > 0.1


def test_psnr_is_that_of_values_of_0_to_1():
    a = np.zeros((1, 2, 2, 3), np.float32)
    assert side_by_side.psnr(a, a + 0.1) == pytest.approx(20)
    assert side_by_side.psnr(a, a) == float("inf")
