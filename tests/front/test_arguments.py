"""What a public function is given stays as it was, but for what it says it changes."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

import sage_inductor
from sage_inductor import Policy, Rule, config, export

pytestmark = pytest.mark.usefixtures("graphs_run_op_by_op")


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.norm = torch.nn.Linear(32, 96), torch.nn.BatchNorm1d(8)
        self.register_forward_hook(lambda module, given, out: out + 0)

    def forward(self, x, mask):
        q, k, v = self.norm(self.qkv(x)).chunk(3, -1)
        return F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], mask)


def picture(x):
    """What would tell that it was changed."""
    if isinstance(x, ExportedProgram):
        nodes = [
            (str(node), str(node.target), str(node.args), set(node.meta)) for node in x.graph.nodes
        ]
        return [nodes, str(x.graph_signature), str(x.module_call_graph), picture(x.state_dict)]
    if isinstance(x, torch.nn.Module):
        hooks = [
            (list(m._forward_hooks), list(m._forward_pre_hooks), m.training) for m in x.modules()
        ]
        names = [[name for name in vars(m) if name[0] != "_"] for m in x.modules()]
        return [hooks, names, picture(list(x.parameters())), picture(dict(x.named_buffers()))]
    if isinstance(x, torch.Tensor):
        grad = None if x.grad is None else x.grad.tolist()
        return x.tolist(), x.stride(), x.dtype, x.requires_grad, grad
    if isinstance(x, (dict, list, tuple)):
        spec = pytree.tree_structure(x)
        return spec, [x if isinstance(x, (Policy, Rule, str, float, int, type(None))) else picture(x)
                      for x in pytree.tree_leaves(x)]  # fmt: skip
    return repr(x)


RULES = [{"module": "*", "recipe": "sage1", "note": ["why"]}, Rule("off", length=(9000, None))]


@pytest.fixture(params=["a file", "rules", "a dict", "a Policy"])
def options(request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Policy((Rule("sage1"),)).save("policy.json")
    policy = {
        "a file": "policy.json", "rules": copy.deepcopy(RULES),
        "a dict": {"version": 1, "rules": [{"recipe": "sage1"}], "note": {"a": [1]}},
        "a Policy": Policy((Rule("sage1"),)),
    }[request.param]  # fmt: skip
    return {"sage.policy": policy, "sage.emulate": True, "sage.force": True}


def explain(model, x, mask, options):
    sage_inductor.explain(model, options=options)(x, mask=mask)


def compile_(model, x, mask, options):
    torch.compile(model, backend="sage", options={**options})(x, mask=mask)


def diagnose(model, x, mask, options):
    sage_inductor.diagnose(model, recipes="sage1")(x, mask=mask)


def diagnosing(model, x, mask, options):
    with sage_inductor.diagnosing(model, recipes="sage1"):
        model(x, mask=mask)


def configure(model, x, mask, options):
    with config.patch({name.removeprefix("sage."): value for name, value in options.items()}):
        sage_inductor.attention(*(x[:, None, :, :32],) * 3, attn_mask=mask)


@pytest.mark.parametrize("call", [explain, compile_, diagnose, diagnosing, configure])
def test_models_inputs_and_options_stay_as_they_were(call, options):
    model, x = Model().eval(), torch.randn(3, 8, 32)
    mask = torch.rand(3, 1, 8, 8) < 0.7
    given = model, x, mask, options
    before = [picture(each) for each in given]
    call(*given)
    assert [picture(each) for each in given] == before
    assert sage_inductor.report() is not None


def test_a_diagnosis_of_training_leaves_parameters_gradients_and_buffers():
    model, x = Model().train(), torch.randn(3, 8, 32)
    model(x, None).sum().backward()
    before = picture(model), picture(x)
    found = sage_inductor.diagnose_training(model, loss=lambda out: out.square().mean())(x, None)
    assert found.rows and (picture(model), picture(x)) == before


def test_a_program_that_is_packaged_stays_as_it_was_and_one_that_is_rewritten_does_not(
    options, monkeypatch
):
    given = torch.randn(3, 8, 32), torch.rand(3, 1, 8, 8) < 0.7
    program, packaged = torch.export.export(Model().eval(), given), []
    configs = {"max_autotune": False}
    monkeypatch.setattr(export, "_holds_its_own_libstdcxx", lambda path: False)
    before = [picture(each) for each in (program, options, configs)]
    monkeypatch.setattr(
        torch._inductor, "aoti_compile_and_package",
        lambda program, package_path, inductor_configs: packaged.append(program) or "none",
    )  # fmt: skip
    sage_inductor.aoti_compile_and_package(program, inductor_configs=configs, options=options)
    assert [picture(each) for each in (program, options, configs)] == before
    sage_inductor.rewrite(program, options=options)
    assert picture(program) == picture(packaged[0]) != before[0]
    assert picture(options) == before[1]
