"""What of the bench of whole models needs no GPU: the models, their columns, gates, tables."""

import pytest
import torch

from bench import models
from bench.tables import speed_of

pytestmark = pytest.mark.models


QUICK = "wan_1_3b", "llama_16k"


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.sweep] * (x not in QUICK)) for x in models.MODELS]
)
@torch.no_grad()
def test_a_model_takes_its_inputs_at_its_size(name):
    model = models.MODELS[name]
    module, inputs = models.draw(model, "meta")
    tokens = []

    def attended(query, *_, **given):
        tokens.append(query.shape[2])
        return torch.empty_like(query)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", attended)
        # It asks whether positions begin anew, which no tensor on "meta" tells.
        masks = "transformers.masking_utils.find_packed_sequence_indices"
        patch.setattr(masks, lambda *_: None)
        out = models.Column(module, inputs, "eager", model.repeated).call()
    assert out.dtype == torch.bfloat16 and max(tokens) == model.tokens
    assert torch.get_default_dtype() == torch.float32


def test_the_table_has_seconds_ranges_and_no_row_that_failed():
    times = dict(eager=3.0, inductor=2.0, sage=1000.0)
    row = dict(
        model="flux", tokens=4608, error=None, ms=times, rel_l1=0.01, of_eager=0.02,
        first_s=dict.fromkeys(times, 9.4), peak_bytes=dict.fromkeys(times, 2**30),
        speed=dict(
            eager=speed_of([2.0, 2.0], [3.0, 3.3]), inductor=speed_of([2.0, 2.0], [1.0, 3.0])
        ),
    )  # fmt: skip
    _, _, line = models.table([row, {"error": "it failed"}]).splitlines()
    assert line == (
        "| Flux, 1024 px | 4,608 | 3.0 ms | 2.0 ms | 1.00 s | 1.57x (1.50 to 1.65) | no change "
        "(0.50 to 1.50) | 1.00% (2.00%) | 9 and 9 | 1.0 and 1.0 |"
    )
    with pytest.raises(ValueError, match="not near inductor's: relative L1 nan"):
        models.error_of(torch.full((2,), torch.nan), torch.ones(2))
