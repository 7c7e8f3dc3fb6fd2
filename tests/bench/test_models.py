"""What of the bench of whole models needs no GPU: the models, their columns, gates, tables."""

import pytest
import torch

from bench import models

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
